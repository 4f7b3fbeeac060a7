"""Does the learning-rate schedule fit into the run?"""

from __future__ import annotations

from hybridrl.config.choices import LrSchedule
from hybridrl.config.schema import ExperimentConfig, OptimizerConfig
from hybridrl.preflight.command import Command
from hybridrl.preflight.report import Report


def check_optimizer(report: Report, config: ExperimentConfig, command: Command) -> None:
    """Check that decaying schedules fall, and have steps left to fall in after warm-up."""
    if command is Command.SFT:
        total, keys = config.sft.num_steps, ("sft.num_steps",)
        _check_schedule(report, "actor.optimizer", config.actor.optimizer, total, keys)
        return
    per_step, steps = config.algorithm.updates_per_step, config.trainer.num_steps
    product = ("trainer.num_steps", "algorithm.mini_batches_per_step", "algorithm.epochs_per_step")
    if not config.algorithm.needs_values:
        _check_schedule(report, "actor.optimizer", config.actor.optimizer, steps * per_step, product)
        return
    _check_schedule(report, "critic.optimizer", config.critic.optimizer, steps * per_step, product)
    warmup = config.critic.warmup_steps
    if warmup >= steps:
        expected = f"less than trainer.num_steps = {steps}, or the actor never learns"
        report.add("critic.warmup_steps", warmup, expected, "lower it", related=("trainer.num_steps",))
        return
    of_actor = (*product, "critic.warmup_steps")
    _check_schedule(report, "actor.optimizer", config.actor.optimizer, (steps - warmup) * per_step, of_actor)


def _check_schedule(
    report: Report, section: str, optimizer: OptimizerConfig, total: int, keys: tuple[str, ...]
) -> None:
    if optimizer.schedule is LrSchedule.CONSTANT:
        return
    if optimizer.min_lr > optimizer.lr:
        expected = f"at most {section}.lr = {optimizer.lr:g}"
        report.add(f"{section}.min_lr", optimizer.min_lr, expected, "lower it", related=(section,))
    if optimizer.warmup_steps >= total:
        expected = f"less than the run's {total} optimizer step(s) ({' x '.join(keys)}), since schedule is {optimizer.schedule.value}"
        next_step = f"lower it or set {section}.schedule to constant"
        related = (f"{section}.schedule", *keys)
        report.add(f"{section}.warmup_steps", optimizer.warmup_steps, expected, next_step, related=related)
