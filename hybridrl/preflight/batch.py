"""Batch and token arithmetic: from prompts per step to micro-batches per rank, checked and printed with its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.agents import max_added_tokens
from hybridrl.config.schema import ExperimentConfig
from hybridrl.preflight.command import Command
from hybridrl.preflight.report import Report, divisors


@dataclass(frozen=True, slots=True)
class BatchArithmetic:
    """How one step's samples are split.

    Worked example: 32 prompts x 8 samples, 2 mini-batches, dp_size 2, micro-batches of 16: 256 samples per step, 128 per
    optimizer step, 64 of them per rank, in 4 micro-batches.
    """

    origin: str
    samples_per_step: int
    mini_batches: int
    dp_size: int
    micro_batch_samples: int

    @property
    def samples_per_update(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.samples_per_step // self.mini_batches

    @property
    def samples_per_rank(self) -> int:
        """Samples of one optimizer step on one data-parallel rank."""
        return self.samples_per_update // self.dp_size

    def __str__(self) -> str:
        return (
            f"{self.origin} = {self.samples_per_step} samples per step; {self.mini_batches} optimizer step(s) of "
            f"{self.samples_per_update}; {self.samples_per_rank} on each of {self.dp_size} data-parallel rank(s), in "
            f"{self.samples_per_rank // self.micro_batch_samples} micro-batch(es) of {self.micro_batch_samples}"
        )


def check_batch(report: Report, config: ExperimentConfig, command: Command) -> BatchArithmetic:
    """Check that samples divide into mini-batches, ranks and micro-batches."""
    algorithm, actor = config.algorithm, config.actor
    if command is Command.SFT:
        origin, total, mini_batches = "samples_per_step", config.sft.samples_per_step, 1
        total_keys: tuple[str, ...] = ("sft.samples_per_step",)
    else:
        origin = f"{algorithm.prompts_per_step} prompts x {algorithm.samples_per_prompt} samples"
        total = algorithm.prompts_per_step * algorithm.samples_per_prompt
        mini_batches = algorithm.mini_batches_per_step
        total_keys = ("algorithm.prompts_per_step", "algorithm.samples_per_prompt", "algorithm.mini_batches_per_step")
    batch = BatchArithmetic(origin, total, mini_batches, actor.parallel.dp_size, actor.micro_batch_samples_per_rank)
    if total % mini_batches:
        expected = f"a divisor of {origin} = {total} samples per step"
        report.add("algorithm.mini_batches_per_step", mini_batches, expected, _choose(total), related=total_keys)
    elif batch.samples_per_update % batch.dp_size:
        expected = f"a divisor of {batch.samples_per_update} samples per optimizer step ({origin} / {mini_batches})"
        next_step = _choose(batch.samples_per_update)
        report.add("actor.parallel.dp_size", batch.dp_size, expected, next_step, related=total_keys)
    elif batch.samples_per_rank % batch.micro_batch_samples:
        shares = f"{origin} / {mini_batches} optimizer step(s) / dp_size {batch.dp_size}"
        expected = f"a divisor of {batch.samples_per_rank} samples per rank ({shares})"
        key, related = "actor.micro_batch_samples_per_rank", (*total_keys, "actor.parallel.dp_size")
        report.add(key, batch.micro_batch_samples, expected, _choose(batch.samples_per_rank), related=related)
    return batch


def check_tokens(report: Report, config: ExperimentConfig) -> None:
    """Check that the longest sample fits into the model length of the rollout engine."""
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


def _choose(total: int) -> str:
    return f"choose one of {divisors(total)}"
