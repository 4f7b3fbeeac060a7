"""Batch and token arithmetic: from prompts per step to micro-batches per rank, checked and printed with its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.agents import max_added_tokens
from hybridrl.config.schema import ExperimentConfig, ParallelConfig
from hybridrl.layout.parallel import alignment
from hybridrl.layout.roles import megatron_roles
from hybridrl.preflight.command import Command
from hybridrl.preflight.report import Report, divisors


@dataclass(frozen=True, slots=True)
class BatchArithmetic:
    """How one step's samples are split.

    Worked example: 32 prompts x 8 samples, 2 mini-batches, dp_size 2, micro-batches of 4096 tokens: 256 samples per step, 128
    per optimizer step, shared by 2 data-parallel ranks and packed into as few micro-batches as their tokens need.
    """

    origin: str
    samples_per_step: int
    mini_batches: int
    dp_size: int
    micro_batch_tokens: int

    @property
    def samples_per_update(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.samples_per_step // self.mini_batches

    def __str__(self) -> str:
        return (
            f"{self.origin} = {self.samples_per_step} samples per step; {self.mini_batches} optimizer step(s) of "
            f"{self.samples_per_update}, shared by {self.dp_size} data-parallel rank(s) in micro-batches of at most "
            f"{self.micro_batch_tokens} tokens"
        )


def check_batch(report: Report, config: ExperimentConfig, command: Command) -> BatchArithmetic:
    """Check that samples divide into mini-batches, and that every rank gets one."""
    algorithm, actor = config.algorithm, config.actor
    if command is Command.SFT:
        origin, total, mini_batches = "samples_per_step", config.sft.samples_per_step, 1
        total_keys: tuple[str, ...] = ("sft.samples_per_step",)
    else:
        origin = f"{algorithm.prompts_per_step} prompts x {algorithm.samples_per_prompt} samples"
        total = algorithm.prompts_per_step * algorithm.samples_per_prompt
        mini_batches = algorithm.mini_batches_per_step
        total_keys = ("algorithm.prompts_per_step", "algorithm.samples_per_prompt", "algorithm.mini_batches_per_step")
    batch = BatchArithmetic(origin, total, mini_batches, actor.parallel.dp_size, actor.micro_batch.tokens)
    if total % mini_batches:
        expected = f"a divisor of {origin} = {total} samples per step"
        report.add("algorithm.mini_batches_per_step", mini_batches, expected, _choose(total), related=total_keys)
        return batch
    actor_role, *beside = megatron_roles(config)
    others = [placed for placed in beside if placed.parallel.dp_size != actor_role.parallel.dp_size]
    for placed in (actor_role, *(others if command is Command.TRAIN else ())):
        if batch.samples_per_update < (dp_size := placed.parallel.dp_size):
            expected = f"at most the {batch.samples_per_update} samples per optimizer step ({origin} / {mini_batches})"
            report.add(f"{placed.section}.parallel.dp_size", dp_size, expected, "lower it", related=total_keys)
    return batch


def check_tokens(report: Report, config: ExperimentConfig) -> None:
    """Check that the longest sample fits into the model length of the rollout engine and into a micro-batch."""
    rollout, data = config.rollout, config.data
    added = max_added_tokens(data.task, rollout.max_response_tokens)
    needed = data.max_prompt_tokens + added
    if rollout.max_model_tokens < needed:
        expected = (
            f"at least {needed} = {data.max_prompt_tokens} prompt tokens (data.max_prompt_tokens) + {added} tokens of "
            f"responses and tool results (task {data.task.value})"
        )
        related = ("data.max_prompt_tokens", "rollout.max_response_tokens", "data.task")
        report.add("rollout.max_model_tokens", rollout.max_model_tokens, expected, "raise it", related=related)
    check_budget(report, config, "actor.micro_batch.tokens", "actor.parallel", config.actor.parallel)


def check_budget(
    report: Report,
    config: ExperimentConfig,
    key: str,
    section: str,
    parallel: ParallelConfig,
    budget: int | None = None,
) -> None:
    """Check that the longest sample fits into a micro-batch of a role.

    Args:
        key: Of the role's budget.
        section: Of its degrees.
        budget: Tokens; None takes those of the actor.
    """
    budget = budget or config.actor.micro_batch.tokens
    multiple, longest = alignment(parallel), config.rollout.max_model_tokens
    aligned = -(-longest // multiple) * multiple
    if budget < aligned:
        expected = f"at least {aligned}, the longest sample (rollout.max_model_tokens) as a multiple of {multiple}"
        report.add(key, budget, expected, "raise it", related=("rollout.max_model_tokens", section))


def _choose(total: int) -> str:
    return f"choose one of {divisors(total)}"
