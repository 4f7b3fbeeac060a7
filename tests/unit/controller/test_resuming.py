"""What a run goes on from: the newest intact checkpoint, and never a damaged one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.checkpoint.folder import MODEL, CheckpointFolder, rank_file
from hybridrl.checkpoint.manifest import record_of
from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.schema import CheckpointConfig, ExperimentConfig, ModelConfig, TrainerConfig
from hybridrl.controller.resuming import Resumed, find_resumable, is_continued, load_newest
from hybridrl.controller.run_state import RunState, batch_settings, write_run_state
from hybridrl.data.stream import StreamState
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.layout.roles import ModelRole
from tests.unit.controller.fakes import FakeSavedModel


def state(step: int) -> RunState:
    settings = batch_settings(AlgorithmConfig(), TrainerConfig())
    return RunState(step, StreamState(step, 0, 1), {}, (), (), settings)


def write_model(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, **changes}))
    return folder


def write(root: Path, *steps: int) -> None:
    folder = CheckpointFolder(root, keep=9)
    for step in steps:
        path = folder.begin(step)
        (path / rank_file("actor", 0)).write_bytes(b"weights")
        write_model(path / MODEL)
        files = {name: record_of(path / name) for name in (rank_file("actor", 0), f"{MODEL}/config.json")}
        folder.complete(step, write_run_state(path, state(step)) | files)


def config(tmp_path: Path, resume: str, folder: Path | None = None) -> ExperimentConfig:
    checkpoint = CheckpointConfig(folder=None if folder is None else str(folder))
    trainer = TrainerConfig(resume=resume)
    model = tmp_path / "model"
    if not model.is_dir():
        write_model(model, transformers_version="9")
    return ExperimentConfig(
        name="run", runs_dir=str(tmp_path), model=ModelConfig(path=str(model)), trainer=trainer, checkpoint=checkpoint
    )


def load(config: ExperimentConfig, actor: FakeSavedModel, said: list[str], *more: FakeSavedModel) -> Resumed | None:
    return load_newest(find_resumable(config), [actor, *more], said.append)


def test_auto_takes_the_newest_intact_one_and_says_what_it_skipped(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    write(root, 10, 20, 30, 40)
    (root / "step_000040" / "run.json").write_text("")
    (root / "step_000050").mkdir()
    said: list[str] = []
    resumed = load(config(tmp_path, "auto"), FakeSavedModel(damaged=frozenset({"step_000030"})), said)
    assert resumed == Resumed(root / "step_000020", state(20))
    assert said[0].startswith(f"skipping a checkpoint: {root}/step_000040/run.json: 0 bytes, expected")
    assert said[1:] == [
        f"skipping a checkpoint: {root}/step_000050: the save did not end",
        f"skipping a checkpoint: {root}/step_000030: bad",
        f"going on after step 20, from {root}/step_000020",
    ]


def test_auto_starts_over_only_when_nothing_was_ever_complete(tmp_path: Path) -> None:
    assert load(config(tmp_path, "auto"), FakeSavedModel(), []) is None
    root = tmp_path / "run" / "checkpoints"
    (root / "step_000010").mkdir(parents=True)
    assert load(config(tmp_path, "auto"), FakeSavedModel(), []) is None
    write(root, 20)
    with pytest.raises(
        CheckpointError, match=r"not one checkpoint is complete and as it was written\n.*step_000020: bad"
    ):
        load(config(tmp_path, "auto"), FakeSavedModel(damaged=frozenset({"step_000020"})), [])
    (root / "step_000020" / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r"run\.json: missing"):
        find_resumable(config(tmp_path, "auto"))


def test_auto_goes_on_in_the_folder_of_the_run_whether_or_not_it_came_to_a_checkpoint(tmp_path: Path) -> None:
    assert not is_continued(config(tmp_path, "auto"))
    (tmp_path / "run").mkdir()  # all that a job leaves whose roles did not start
    assert is_continued(config(tmp_path, "auto"))
    assert not is_continued(config(tmp_path, "never"))
    assert not is_continued(config(tmp_path, str(tmp_path / "run")))


def test_auto_does_not_replace_a_run_that_makes_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert find_resumable(config(tmp_path, "auto")).complete == ()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ConfigError, match="is a run without checkpoints, which auto would replace"):
        find_resumable(config(tmp_path, "auto"))


def test_another_seed_and_batches_of_another_size_or_lag_are_refused_before_anything_starts(tmp_path: Path) -> None:
    experiment = config(tmp_path, "auto")
    write(tmp_path / "run" / "checkpoints", 10)
    find_resumable(experiment)
    experiment.algorithm.prompts_per_step, experiment.trainer.max_policy_lag, experiment.seed = 7, 1, 2
    with pytest.raises(ConfigError) as caught:
        find_resumable(experiment)
    assert [problem.split(", expected")[0] for problem in caught.value.problems] == [
        "algorithm.prompts_per_step: got 7",
        "trainer.max_policy_lag: got 1",
        "seed: got 2",
    ]


def test_another_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write(tmp_path / "run" / "checkpoints", 10)
    wider = replace(config(tmp_path, "auto"), model=ModelConfig(path=str(write_model(tmp_path / "w", hidden_size=128))))
    with pytest.raises(
        ConfigError, match=r"model.path: .*/w is another model than that of .*; config.json differs in hidden_size"
    ):
        find_resumable(wider)
    saved = tmp_path / "run" / "checkpoints" / "step_000010" / MODEL / "config.json"
    saved.write_text("{" * saved.stat().st_size)  # loading says that
    find_resumable(wider)


@pytest.mark.parametrize("place", ["other", "other/checkpoints", "other/checkpoints/step_000010"])
def test_a_path_is_gone_on_from(tmp_path: Path, place: str) -> None:
    write(tmp_path / "other" / "checkpoints", 10)
    actor = FakeSavedModel()
    resumed = load(config(tmp_path, str(tmp_path / place)), actor, [])
    assert resumed is not None and resumed.state.step == 10
    assert actor.loaded == [tmp_path / "other" / "checkpoints" / "step_000010" / rank_file("actor", 0)]


def test_a_checkpoint_without_a_critic_is_not_taken_for_an_algorithm_that_has_one(tmp_path: Path) -> None:
    write(tmp_path / "run" / "checkpoints", 10)
    critic = FakeSavedModel(ModelRole.CRITIC)
    with pytest.raises(CheckpointError, match="step_000010: has no critic; resume with the algorithm of that run"):
        load(config(tmp_path, "auto"), FakeSavedModel(), [], critic)


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        find_resumable(config(tmp_path, str(tmp_path)))


def test_a_new_run_does_not_write_among_the_checkpoints_of_another(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    assert find_resumable(config(tmp_path, "never", shared)).complete == ()
    write(shared, 10)
    for resume in ("never", str(shared)):
        with pytest.raises(ConfigError, match=r"has checkpoints of an earlier run; .*trainer.resume=auto"):
            find_resumable(config(tmp_path, resume, shared))
    assert find_resumable(config(tmp_path, "auto", shared)).complete
