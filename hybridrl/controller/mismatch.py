"""How far the sampler's policy lies from the trainer's, on the tokens that the sampler drew.

    d_t = old_logprobs_t - rollout_logprobs_t

On tokens that the version being trained drew itself, both engines compute the same number and d_t is rounding; anything
more means different weights, kernels, routing or positions. Older tokens (``max_policy_lag`` above 0) differ by what was
learnt since. Off-policy training starts here, whatever the algorithm believes, so this is measured at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrl.controller.batches import ScoredBatch
from hybridrl.data.batch import Floats
from hybridrl.errors import EngineError
from hybridrl.observability.records import Metric

LARGE = 0.1
"""Nats beyond which a token counts as far off: its probability differs by more than a tenth."""

_MAX_EXPONENT = 20.0


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Over the tokens that the policy produced; all 0, and pearson 1, when there are none.

    Attributes:
        abs_max: Largest |d|.
        abs_mean: Mean |d|.
        kl_k3: Mean of exp(d) - d - 1, an estimate of KL(sampler || trainer) that is never negative (J. Schulman, "Approximating KL
            Divergence", 2020).
        pearson: Correlation of the two probabilities, between -1 and 1.
        large_share: Share of tokens with |d| above :data:`LARGE`.
    """

    abs_max: float
    abs_mean: float
    kl_k3: float
    pearson: float
    large_share: float

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics under ``logprob/``."""
        return {
            "logprob/rollout_vs_old_abs_max": self.abs_max,
            "logprob/rollout_vs_old_abs_mean": self.abs_mean,
            "logprob/rollout_vs_old_kl_k3": self.kl_k3,
            "logprob/rollout_vs_old_pearson": self.pearson,
            "logprob/rollout_vs_old_large_share": self.large_share,
        }


def check_mismatch(batch: ScoredBatch, old_logprobs: Floats, version: int, max_gap: float | None) -> Mismatch:
    """Measure the mismatch of a batch, and hold tokens that `version` itself sampled to a threshold.

    Args:
        old_logprobs: [num_samples, max_tokens].
        max_gap: Bound on |d| in nats; None sets none.

    Raises:
        EngineError: When a log-prob is not finite or the threshold is passed; names the sample and the token.
    """
    gaps = np.where(batch.loss_mask, old_logprobs.astype(np.float64) - batch.rollout_logprobs, 0.0)
    if not np.isfinite(gaps).all():
        raise EngineError(_describe("is not finite", batch, old_logprobs, ~np.isfinite(gaps)))
    on_policy = np.where(batch.policy_versions == version, np.abs(gaps), 0.0)
    if max_gap is not None and on_policy.max(initial=0.0) > max_gap:
        what = f"is {on_policy.max():.3g}, expected at most {max_gap:g} (trainer.max_logprob_gap)"
        raise EngineError(_describe(what, batch, old_logprobs, on_policy == on_policy.max()))
    return measure(batch.rollout_logprobs[batch.loss_mask], old_logprobs[batch.loss_mask])


def measure(rollout_logprobs: Floats, old_logprobs: Floats) -> Mismatch:
    """Compare two [num_tokens] arrays of finite log-probs of the same tokens."""
    if not len(rollout_logprobs):
        return Mismatch(0.0, 0.0, 0.0, 1.0, 0.0)
    sampler, trainer = rollout_logprobs.astype(np.float64), old_logprobs.astype(np.float64)
    gaps = trainer - sampler
    bounded = gaps.clip(-_MAX_EXPONENT, _MAX_EXPONENT)
    return Mismatch(
        abs_max=float(np.abs(gaps).max()),
        abs_mean=float(np.abs(gaps).mean()),
        kl_k3=float((np.expm1(bounded) - bounded).mean()),
        pearson=_pearson(np.exp(sampler), np.exp(trainer)),
        large_share=float((np.abs(gaps) > LARGE).mean()),
    )


def _pearson(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the correlation; of constants, which have none, 1 when they are equal and 0 otherwise."""
    a, b = one - one.mean(), other - other.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float(np.array_equal(one, other))


def _describe(what: str, batch: ScoredBatch, old_logprobs: Floats, where: NDArray[np.bool_]) -> str:
    row, token = (int(index) for index in np.argwhere(where)[0])
    sample = batch.samples[row]
    return (
        f"log-prob difference of prompt {sample.prompt.prompt_id} sample {sample.sample_index}, token {token} "
        f"(id {int(batch.sequences.token_ids[row, token])}, sampled by version {int(batch.policy_versions[row, token])}) {what}: "
        f"sampler {float(batch.rollout_logprobs[row, token]):.6g}, trainer {float(old_logprobs[row, token]):.6g}. "
        "The two engines hold different weights or compute different models"
    )
