"""Which settings exclude each other, and which would not be read: a setting that is ignored is an error."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from hybridrl.config.choices import LrSchedule, Platform, ProfileTool, TaskName, WandbMode
from hybridrl.config.schema import ExperimentConfig, TrainerConfig
from hybridrl.config.step_list import is_step_list
from hybridrl.preflight.algorithm import unread_by_algorithm
from hybridrl.preflight.command import Command
from hybridrl.preflight.report import Report
from hybridrl.preflight.reward import unread_of_reward
from hybridrl.preflight.roles import unread_by_roles

_SFT_READS_OF_TRAINER = ("trainer.hang_timeout_s", "trainer.train_timeout_s", "trainer.startup_timeout_s")
_HANG_SHARE = 0.8
_FILES_ONLY = (
    "train_path",
    "eval_path",
    "prompt_key",
    "answer_key",
    "id_key",
    "text_as_chat",
    "system_prompt",
    "long_prompts",
    "curriculum",
)


def check_modes(report: Report, config: ExperimentConfig, command: Command) -> None:
    """Check combinations of settings."""
    trainer = config.trainer
    if trainer.stop_at_accuracy is not None and trainer.eval_every_steps == 0:
        key, expected = "trainer.stop_at_accuracy", "null, since trainer.eval_every_steps is 0"
        report.add(key, trainer.stop_at_accuracy, expected, "turn evaluation on", related=("trainer.eval_every_steps",))
    if trainer.replay_steps is not None and not is_step_list(trainer.replay_steps):
        report.add("trainer.replay_steps", trainer.replay_steps, "steps such as 0,10-12,/50", "correct it")
    _check_hang_timeout(report, trainer, command)
    _check_trackers(report, config)
    _check_unread(report, config, command)


def _check_hang_timeout(report: Report, trainer: TrainerConfig, command: Command) -> None:
    """A call that may take no longer than a hang would end by its own bound, without a verdict."""
    bounds = {"trainer.train_timeout_s": trainer.train_timeout_s}
    if command is Command.TRAIN:
        bounds["trainer.rollout_timeout_s"] = trainer.rollout_timeout_s
    for key, bound_s in bounds.items():
        if trainer.hang_timeout_s > _HANG_SHARE * bound_s:
            expected = (
                f"at most {_HANG_SHARE:.0%} of {key} {bound_s:g}, which would end a call before it is seen to hang"
            )
            report.add("trainer.hang_timeout_s", f"{trainer.hang_timeout_s:g}", expected, "lower it", related=(key,))


def _check_trackers(report: Report, config: ExperimentConfig) -> None:
    """A tracker whose package is missing would end the run after everything has started."""
    tracking = config.tracking
    trackers = (
        ("tracking.wandb", tracking.wandb.value, "wandb", tracking.wandb is not WandbMode.OFF),
        ("tracking.mlflow_uri", tracking.mlflow_uri, "mlflow", tracking.mlflow_uri is not None),
    )
    for key, got, package, is_on in trackers:
        if is_on and importlib.util.find_spec(package) is None:
            report.add(key, got, f"the package {package} to be installed", f"pip install {package}, or turn it off")


def _check_unread(report: Report, config: ExperimentConfig, command: Command) -> None:
    default = ExperimentConfig()
    seen: set[str] = set()
    for section, reason in _unread(config, command):
        for key in report.draft.keys_set(section):
            is_read = command is Command.SFT and key in _SFT_READS_OF_TRAINER
            if key not in seen and not is_read and value_of(config, key) != value_of(default, key):
                seen.add(key)
                report.add(key, "a value", f"none: it is not read {reason}", "remove it")


def _unread(config: ExperimentConfig, command: Command) -> Iterator[tuple[str, str]]:
    """Yield keys and sections that have no effect, and why."""
    if command is Command.TRAIN:
        yield "sft", "by hybridrl train"
        yield from unread_by_algorithm(config.algorithm)
        yield from unread_by_roles(config)
    else:
        sections = (
            "placement",
            "reference",
            "critic",
            "rollout",
            "reward",
            "algorithm",
            "weight_sync",
            "trainer",
            "checkpoint",
            "profile",
        )
        for section in (*sections, "data.eval_path", "data.num_eval_prompts", "data.eval_samples_per_prompt"):
            yield section, "by hybridrl sft"
        yield "actor.router_replay", "by hybridrl sft"
    yield from _unread_of_what_is_off(config)
    if config.platform is Platform.CPU:
        yield "rollout.gpu_memory_fraction", "when platform is cpu"
    else:
        yield "rollout.kv_cache_gib", "when platform is cuda"
        yield "actor.threads_per_rank", "when platform is cuda"
        yield "rollout.threads_per_rank", "when platform is cuda"
    if config.data.task is TaskName.FILE:
        yield "sft.tool_fraction", "when data.task is file"
        yield from unread_of_reward(config.reward)
    else:
        for name in _FILES_ONLY:
            yield f"data.{name}", f"when data.task is {config.data.task.value}"
        yield "reward", f"when data.task is {config.data.task.value}, which brings its own reward"
    if config.actor.optimizer.schedule is LrSchedule.CONSTANT:
        yield "actor.optimizer.min_lr", "when actor.optimizer.schedule is constant"


def _unread_of_what_is_off(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """Yield keys of what another key of their section turns off."""
    if not config.checkpoint.every_steps:
        for name in ("keep", "is_async", "timeout_s"):
            yield f"checkpoint.{name}", "when checkpoint.every_steps is 0"
    if config.profile.tool is ProfileTool.OFF:
        for name in ("roles", "ranks", "steps"):
            yield f"profile.{name}", "when profile.tool is off"
    if config.tracking.wandb is WandbMode.OFF:
        yield "tracking.wandb_project", "when tracking.wandb is off"
    if config.tracking.prometheus_port is None:
        yield "tracking.prometheus_host", "when tracking.prometheus_port is null"


def value_of(config: ExperimentConfig, key: str) -> object:
    """Return the value of a dotted key."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
