"""The numbers of one step, by the names under which they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridrl.algos.advantages import Advantages
from hybridrl.controller.batches import ScoredBatch
from hybridrl.controller.mismatch import Mismatch
from hybridrl.observability.records import Metric

if TYPE_CHECKING:
    from hybridrl.controller.weight_sync import SyncReport
    from hybridrl.engines.megatron.results import UpdateMetrics
    from hybridrl.roles.megatron_group import TokenLogprobs


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
    mismatch: Mismatch
    advantages: Advantages
    updates: Sequence[UpdateMetrics]
    sync: SyncReport
    num_dropped: int


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
        **outcome.mismatch.metrics(),
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
