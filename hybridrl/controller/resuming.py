"""Finds what a run goes on from, and brings it into the trained models (``trainer.resume``).

The newest checkpoint is taken whose files are as they were written. Names and sizes are compared before anything starts, content
by the training ranks, each of which reads a share. What is skipped is said, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.checkpoint.folder import CHECKPOINTS, MODEL, Checkpoint, Found, find_at, find_checkpoints, none_usable
from hybridrl.config.schema import RESUME_AUTO, RESUME_NEVER, ExperimentConfig
from hybridrl.controller.interfaces import SavedModel
from hybridrl.controller.run_state import RunState, batch_settings, read_batch_settings, read_run_state
from hybridrl.errors import CheckpointError, ConfigError, LayoutError
from hybridrl.layout.families import differing_fields, read_hf_config
from hybridrl.roles.future import wait_all, wait_for


@dataclass(frozen=True, slots=True)
class Resumed:
    """A checkpoint whose training state the models have taken over."""

    folder: Path
    state: RunState


def checkpoints_folder(config: ExperimentConfig, run_dir: Path) -> Path:
    """Return where the checkpoints of a run are, as every process can find it."""
    return Path(config.checkpoint.folder or run_dir / CHECKPOINTS).absolute()


def is_continued(config: ExperimentConfig) -> bool:
    """Whether the run goes on in the folder of an earlier one, which may have ended before its first checkpoint."""
    return config.trainer.resume == RESUME_AUTO and (Path(config.runs_dir) / config.name).is_dir()


def find_resumable(config: ExperimentConfig) -> Found:
    """Look for the checkpoints that `trainer.resume` names; with ``auto`` and ``never`` there may be none.

    Raises:
        CheckpointError: There is something, but nothing that is complete.
        ConfigError: The run would write among checkpoints that it does not go on from, replace a run that has none, or
            go on with batches of other sizes or with another model.
    """
    own = checkpoints_folder(config, Path(config.runs_dir) / config.name)
    if config.trainer.resume == RESUME_AUTO:
        found = find_checkpoints(own)
        if found.damaged and not found.complete:  # to start over is for a person to decide
            raise none_usable(own, found.damaged)
        if not own.is_dir() and _has_steps(Path(config.runs_dir) / config.name):
            raise ConfigError(
                f"trainer.resume: {Path(config.runs_dir) / config.name} is a run without checkpoints, which {RESUME_AUTO} would "
                "replace; choose another name, or move that run away"
            )
        _check_settings(config, found)
        return found
    fresh = config.trainer.resume == RESUME_NEVER
    found = Found((), (), ()) if fresh else find_at(Path(config.trainer.resume).absolute())
    if config.checkpoint.folder is not None and find_checkpoints(own).complete:
        raise ConfigError(
            f"checkpoint.folder: {own} has checkpoints of an earlier run; choose another folder, or go on with that run: "
            f"trainer.resume={RESUME_AUTO}"
        )
    _check_settings(config, found)
    return found


def _has_steps(run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def _check_settings(config: ExperimentConfig, found: Found) -> None:
    """Refuse what would change the seed, the batches or the model of the run that is gone on with."""
    if not found.complete:
        return
    newest = found.complete[0].folder
    before, now = read_batch_settings(newest), batch_settings(config.algorithm, config.trainer) | {"seed": config.seed}
    problems = [
        f"{key}: got {now[key]}, expected {value} as in {newest}; only a new run can change it"
        for key, value in before.items()
        if now.get(key) != value
    ]
    if fields := _differing_fields(newest / MODEL, Path(config.model.path)):
        problems.append(
            f"model.path: {config.model.path} is another model than that of {newest}; config.json differs in {', '.join(fields)}"
        )
    if problems:
        raise ConfigError(problems)


def _differing_fields(saved: Path, own: Path) -> list[str]:
    try:
        before = read_hf_config(saved)
    except (OSError, LayoutError):  # damaged, which loading says
        return []
    return differing_fields(before, read_hf_config(own))


def load_newest(found: Found, models: Sequence[SavedModel], status: Callable[[str], None]) -> Resumed | None:
    """Bring the newest checkpoint whose content is intact into the trained models; None when there is none at all.

    Args:
        models: All of them, the actor first.
        status: Told which checkpoint was taken, and which were skipped and why.

    Raises:
        CheckpointError: All are damaged, or of another model.
    """
    for skipped in (*found.damaged, *(f"{folder}: the save did not end" for folder in found.unfinished)):
        status(f"skipping a checkpoint: {skipped}")
    damaged = list(found.damaged)
    for checkpoint in found.complete:
        damages = wait_for(models[0].damage_of(checkpoint.folder, checkpoint.manifest.files))
        if not damages:
            return _load(checkpoint, models, status)
        status(f"skipping a checkpoint: {damages[0]}")
        damaged += damages
    if damaged:
        raise none_usable(found.complete[0].folder.parent if found.complete else Path(), damaged)
    return None


def _load(checkpoint: Checkpoint, models: Sequence[SavedModel], status: Callable[[str], None]) -> Resumed:
    status(f"going on after step {checkpoint.manifest.step}, from {checkpoint.folder}")
    files = [checkpoint.rank_files(model.role.value) for model in models]
    for model, of_model in zip(models, files, strict=True):
        if not of_model:
            raise CheckpointError(
                f"{checkpoint.folder}: has no {model.role.value}; resume with the algorithm of that run"
            )
    wait_all([model.load_state(of_model) for model, of_model in zip(models, files, strict=True)])
    return Resumed(checkpoint.folder, read_run_state(checkpoint.folder))
