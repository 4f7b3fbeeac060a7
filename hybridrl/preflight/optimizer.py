"""Does the learning-rate schedule fit into the run?"""

from __future__ import annotations

from hybridrl.config.schema import ExperimentConfig, LrSchedule
from hybridrl.preflight.command import Command
from hybridrl.preflight.report import Report


def check_optimizer(report: Report, config: ExperimentConfig, command: Command) -> None:
    """Check that a decaying schedule falls, and has steps left to fall in after warm-up."""
    optimizer = config.actor.optimizer
    if optimizer.schedule is LrSchedule.CONSTANT:
        return
    if optimizer.min_lr > optimizer.lr:
        key, expected = "actor.optimizer.min_lr", f"at most actor.optimizer.lr = {optimizer.lr:g}"
        report.add(key, optimizer.min_lr, expected, "lower it", related=("actor.optimizer",))
    if command is Command.SFT:
        total, origin = config.sft.num_steps, "sft.num_steps"
        keys: tuple[str, ...] = ("sft.num_steps",)
    else:
        total = config.trainer.num_steps * config.algorithm.mini_batches_per_step
        keys = ("trainer.num_steps", "algorithm.mini_batches_per_step")
        origin = " x ".join(keys)
    if optimizer.warmup_steps >= total:
        key = "actor.optimizer.warmup_steps"
        expected = (
            f"less than the run's {total} optimizer step(s) ({origin}), since schedule is {optimizer.schedule.value}"
        )
        next_step = "lower it or set actor.optimizer.schedule to constant"
        report.add(key, optimizer.warmup_steps, expected, next_step, related=("actor.optimizer.schedule", *keys))
