"""The numbers of one step, by the names under which they are written, and the check of log-probs between engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridrl.algos.advantages import Advantages
from hybridrl.controller.batches import ScoredBatch
from hybridrl.data.batch import Floats
from hybridrl.errors import EngineError
from hybridrl.observability.records import Metric

if TYPE_CHECKING:
    from hybridrl.controller.weight_sync import SyncReport
    from hybridrl.engines.megatron.results import UpdateMetrics
    from hybridrl.roles.megatron_group import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """|rollout_logprobs - old_logprobs| over the tokens that the policy produced; 0 when there are none."""

    abs_max: float
    abs_mean: float


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Everything that one step found out.

    Attributes:
        version: Policy version that the step started from.
        updates: One per mini-batch.
        num_dropped: Samples that could not be scored.
    """

    step: int
    version: int
    batch: ScoredBatch
    old: TokenLogprobs
    gap: LogprobGap
    advantages: Advantages
    updates: Sequence[UpdateMetrics]
    sync: SyncReport
    num_dropped: int


def check_logprob_gap(batch: ScoredBatch, old_logprobs: Floats, version: int, max_gap: float | None) -> LogprobGap:
    """Measure how far the sampler's log-probs lie from the trainer's.

    The threshold holds for tokens that `version` itself sampled: on those the two engines compute the same number, while
    older tokens differ by what was learnt since.

    Raises:
        EngineError: When a log-prob is not finite or the threshold is passed; names the sample and the token.
    """
    gaps = np.abs(batch.rollout_logprobs.astype(np.float64) - old_logprobs)
    gaps[~batch.loss_mask] = 0.0
    if not np.isfinite(gaps).all():
        raise EngineError(_describe("is not finite", batch, old_logprobs, ~np.isfinite(gaps)))
    on_policy = np.where(batch.policy_versions == version, gaps, 0.0)
    if max_gap is not None and on_policy.max(initial=0.0) > max_gap:
        what = f"is {on_policy.max():.3g}, expected at most {max_gap:g} (trainer.max_logprob_gap)"
        raise EngineError(_describe(what, batch, old_logprobs, on_policy == on_policy.max()))
    return LogprobGap(float(gaps.max(initial=0.0)), float(gaps.sum() / max(1, batch.num_response_tokens)))


def step_metrics(outcome: StepOutcome, step_s: float) -> dict[str, Metric]:
    """Return the metrics of a step.

    Args:
        step_s: Wall time of the step, in seconds.
    """
    batch, lags = outcome.batch, outcome.batch.lags(outcome.version)
    num_tokens = max(1, batch.num_response_tokens)
    lengths = np.array([sample.num_response_tokens for sample in batch.samples])
    return {
        "policy_version": outcome.version,
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std()),
        "response_tokens/mean": float(lengths.mean()),
        "response_tokens/max": int(lengths.max()),
        "samples/trained": len(batch.samples),
        "samples/dropped": outcome.num_dropped,
        "groups/zero_advantage": outcome.advantages.num_zero_groups,
        "lag/mean": float(lags.mean()),
        "lag/max": int(lags.max()),
        "actor/entropy": float(outcome.old.entropies[batch.loss_mask].sum() / num_tokens),
        "logprob/rollout_vs_old_abs_max": outcome.gap.abs_max,
        "logprob/rollout_vs_old_abs_mean": outcome.gap.abs_mean,
        **_update_metrics(outcome.updates),
        **outcome.sync.metrics(),
        "time_s/step": step_s,
        "throughput/tokens_per_s": batch.sequences.num_tokens / step_s,
    }


def _update_metrics(updates: Sequence[UpdateMetrics]) -> dict[str, Metric]:
    """Average over mini-batches, each weighing the same."""
    names = {
        "actor/loss": "loss",
        "actor/grad_norm": "grad_norm",
        "actor/lr": "lr",
        "actor/approx_kl": "approx_kl",
        "actor/clip_fraction": "clip_fraction",
        "actor/ref_kl": "ref_kl",
    }
    means: dict[str, Metric] = {
        key: float(np.mean([getattr(update, attribute) for update in updates])) for key, attribute in names.items()
    }
    return means | {"actor/skipped_updates": updates[-1].num_skipped}


def _describe(what: str, batch: ScoredBatch, old_logprobs: Floats, where: np.ndarray) -> str:
    row, token = (int(index) for index in np.argwhere(where)[0])
    sample = batch.samples[row]
    return (
        f"log-prob difference of prompt {sample.prompt.prompt_id} sample {sample.sample_index}, token {token} "
        f"(id {int(batch.sequences.token_ids[row, token])}, sampled by version {int(batch.policy_versions[row, token])}) {what}: "
        f"sampler {float(batch.rollout_logprobs[row, token]):.6g}, trainer {float(old_logprobs[row, token]):.6g}. "
        "The two engines hold different weights or compute different models"
    )
