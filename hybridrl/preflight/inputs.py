"""Are the prompt files, the reward function and the output folder as the configuration says?"""

from __future__ import annotations

import os
from pathlib import Path

from hybridrl.config.choices import TaskName
from hybridrl.config.schema import RESUME_AUTO, RESUME_NEVER, ExperimentConfig
from hybridrl.config.user_function import find_reference
from hybridrl.data.files import CURRICULUM_SIGNATURE
from hybridrl.data.tasks import generated_task
from hybridrl.data.tasks.task import max_held_out
from hybridrl.errors import ConfigError
from hybridrl.preflight.command import Command
from hybridrl.preflight.report import Report
from hybridrl.preflight.reward import check_reward

_SUFFIXES = (".jsonl", ".parquet", ".yaml", ".yml")
_EXPECTED_FILE = "a .jsonl or .parquet file with prompts, a dataset folder, or a .yaml mixture"


def check_inputs(report: Report, config: ExperimentConfig, command: Command) -> None:
    """Check what a run reads besides its model, and where it writes."""
    if config.data.task is TaskName.FILE:
        _check_file(report, "data.train_path", config.data.train_path, is_needed=True)
        if command is Command.TRAIN:
            _check_file(report, "data.eval_path", config.data.eval_path, is_needed=False)
            _check_evaluation(report, config)
            check_reward(report, config)
        _check_curriculum(report, config.data.curriculum)
    elif command is Command.TRAIN:
        _check_held_out(report, config)
    resume = config.trainer.resume
    if command is Command.TRAIN and resume not in (RESUME_AUTO, RESUME_NEVER) and not Path(resume).is_dir():
        expected = f"{RESUME_AUTO}, {RESUME_NEVER}, or the folder of a checkpoint or of a run"
        report.add("trainer.resume", resume, expected, "there is no such folder: correct the path")
    if not _is_plain_name(config.name):
        next_step = "use letters, digits, dots, dashes and underscores"
        report.add("name", repr(config.name), "the name of a folder inside runs_dir", next_step)
    _check_writable(report, "runs_dir", Path(config.runs_dir))
    if command is Command.TRAIN and config.checkpoint.every_steps and config.checkpoint.folder is not None:
        _check_writable(report, "checkpoint.folder", Path(config.checkpoint.folder))
    output = Path(config.sft.output_path)
    if command is Command.SFT and output.exists():
        next_step = "choose another folder or remove this one"
        report.add("sft.output_path", output, "a folder that does not exist yet", next_step)


def _check_file(report: Report, key: str, path: str | None, *, is_needed: bool) -> None:
    if path is None:
        if is_needed:
            report.add(key, "nothing", f"{_EXPECTED_FILE}, since data.task is file", "set it", related=("data.task",))
    elif Path(path).is_dir():
        return
    elif not Path(path).is_file():
        report.add(key, path, _EXPECTED_FILE, "there is no such file: correct the path", is_need=True)
    elif Path(path).suffix not in _SUFFIXES:
        report.add(key, path, _EXPECTED_FILE, "convert the file or correct its suffix")


def _check_writable(report: Report, key: str, folder: Path) -> None:
    """Check that a folder can be made and written in, by that of its parents that is there."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        report.add(
            key, folder, "a folder, or the name of one to make", f"{there} is a file: correct the path", is_need=True
        )
    elif not os.access(there, os.W_OK | os.X_OK):
        next_step = f"{there} may not be written: correct the path or the permissions"
        report.add(key, folder, "a folder to write in", next_step, is_need=True)


def _check_evaluation(report: Report, config: ExperimentConfig) -> None:
    if config.data.eval_path is None and config.trainer.eval_every_steps > 0:
        expected = f"{_EXPECTED_FILE}, since trainer.eval_every_steps is {config.trainer.eval_every_steps}"
        next_step = "set it, or set trainer.eval_every_steps to 0"
        report.add("data.eval_path", "nothing", expected, next_step, related=("data.task", "trainer.eval_every_steps"))


def _check_held_out(report: Report, config: ExperimentConfig) -> None:
    task = generated_task(config.data.task)
    assert task is not None, config.data.task
    limit = max_held_out(task)
    if config.data.num_eval_prompts > limit:
        key, expected = (
            "data.num_eval_prompts",
            f"at most {limit}, half of the questions that task {task.name} holds out",
        )
        report.add(key, config.data.num_eval_prompts, expected, "lower it", related=("data.task",))


def _check_curriculum(report: Report, reference: str | None) -> None:
    if reference is None:
        return
    try:
        find_reference(reference, CURRICULUM_SIGNATURE)
    except ConfigError as e:
        report.add_error("data.curriculum", e)


def _is_plain_name(name: str) -> bool:
    return name not in (".", "..") and all(character.isalnum() or character in "._-" for character in name)
