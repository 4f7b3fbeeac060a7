"""The numbers of one step, by the names under which they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridrl.controller.batches import ScoredBatch
from hybridrl.controller.mismatch import Mismatch
from hybridrl.observability.records import Metric

if TYPE_CHECKING:
    from hybridrl.controller.weight_sync import SyncReport
    from hybridrl.engines.megatron.results import UpdateMetrics, ValueMetrics
    from hybridrl.roles.megatron_policy import TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Everything that one step found out.

    Attributes:
        version: Policy version that the step started from.
        old: None when log-probs before the update were not computed.
        counted: Metrics of the batch and of the algorithm, by name.
        updates: Of the actor, one per mini-batch; none while only the critic learns.
        value_updates: Of the critic, one per mini-batch; none without one.
    """

    step: int
    version: int
    batch: ScoredBatch
    old: TokenLogprobs | None
    mismatch: Mismatch
    counted: Mapping[str, Metric]
    updates: Sequence[UpdateMetrics]
    value_updates: Sequence[ValueMetrics]
    sync: SyncReport


def step_metrics(outcome: StepOutcome, step_s: float) -> dict[str, Metric]:
    """Return the metrics of a step.

    Args:
        step_s: Wall time of the step, in seconds.
    """
    batch, lags = outcome.batch, outcome.batch.lags(outcome.version)
    lengths = np.array([sample.num_response_tokens for sample in batch.samples])
    return {
        "policy_version": outcome.version,
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std()),
        "response_tokens/mean": float(lengths.mean()),
        "response_tokens/max": int(lengths.max()),
        "samples/trained": len(batch.samples),
        **outcome.counted,
        "lag/mean": float(lags.mean()),
        "lag/max": int(lags.max()),
        **_entropy(outcome),
        **(outcome.mismatch.metrics() if outcome.old is not None else {}),
        **_update_metrics(outcome.updates),
        **_value_metrics(outcome.value_updates),
        **outcome.sync.metrics(),
        "time_s/step": step_s,
        "throughput/tokens_per_s": batch.sequences.num_tokens / step_s,
    }


def _entropy(outcome: StepOutcome) -> dict[str, Metric]:
    """Return the mean entropy per response token before the update, or that of the updates where it was not computed."""
    if outcome.old is not None:
        mask = outcome.batch.loss_mask
        return {"actor/entropy": float(outcome.old.entropies[mask].sum() / max(1, mask.sum()))}
    return _means(outcome.updates, {"actor/entropy": "entropy"})


def _update_metrics(updates: Sequence[UpdateMetrics]) -> dict[str, Metric]:
    """Average over mini-batches, each weighing the same."""
    if not updates:
        return {}
    names = {
        "actor/loss": "loss",
        "actor/grad_norm": "grad_norm",
        "actor/lr": "lr",
        "actor/approx_kl": "approx_kl",
        "actor/clip_fraction": "clip_fraction",
        "actor/ref_kl": "ref_kl",
    }
    means = _means(updates, names)
    replayed = sum(update.num_replayed for update in updates)
    if replayed:
        means["router_replay/hits"] = replayed
        means["router_replay/changed_share"] = sum(update.num_replay_changed for update in updates) / replayed
    balances = [update.balance for update in updates if update.balance is not None]
    if balances:
        for name in ("aux_loss", "z_loss", "max_load"):
            means[f"moe/{name}"] = float(np.mean([getattr(balance, name) for balance in balances]))
    return means | {"actor/skipped_updates": updates[-1].num_skipped}


def _value_metrics(updates: Sequence[ValueMetrics]) -> dict[str, Metric]:
    names = ("loss", "grad_norm", "lr", "value_mean", "return_mean", "explained_variance", "clip_fraction")
    means = _means(updates, {f"critic/{name}": name for name in names})
    return means | {"critic/skipped_updates": updates[-1].num_skipped} if updates else means


def _means(updates: Sequence[object], names: Mapping[str, str]) -> dict[str, Metric]:
    """Return the means of attributes over mini-batches, each weighing the same, by metric; nothing without a mini-batch."""
    if not updates:
        return {}
    return {key: float(np.mean([getattr(update, name) for update in updates])) for key, name in names.items()}
