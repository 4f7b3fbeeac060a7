"""Importance weights between the sampler and the trainer's policy before the update.

They repair what the clipped ratio does not see: tokens that an older version sampled (``max_policy_lag`` above 0) and
numerical differences between the two engines. With ``d_t = old_logprobs_t - rollout_logprobs_t``, the ratio is

    token      exp(d_t)
    sequence   exp(sum of d over the sample)    unbiased, of high variance
    geometric  exp(mean of d over the sample)

and the weight of a token's advantage is min(ratio, max_weight) (truncate), or the ratio inside [min_weight, max_weight] and 0
outside (mask). Aggregation still counts tokens of weight 0. With ``old_policy: bypass``, old_logprobs are the sampler's, all
ratios are 1, and the clipping of the policy loss bounds the difference instead.

Sources: truncation: Ionides 2008; mask at the token level: IcePop, "Every Step Evolves", arXiv 2510.18855.

Worked example: d = 0, 1 with max_weight 2: token ratios 1, 2.718 become 1, 2 (truncate) or 1, 0 (mask).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.algorithm import RolloutCorrectionConfig
from hybridrl.config.choices import CorrectionLevel, CorrectionMethod

_MAX_LOG_RATIO = 80.0
"""Log ratios are clamped to this magnitude before exp, which keeps float32 finite."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights of a batch, and how far they are from 1.

    Attributes:
        weights: [num_samples, max_tokens] float32; exactly 1 where the two policies agree, 0 outside the mask.
        effective_samples: (sum w)^2 / (N sum w^2) over the N trained tokens, in [0, 1]; 1 without a trained token.
        clip_fraction: Share of trained tokens whose ratio was out of bounds.
    """

    weights: NDArray[np.float32]
    effective_samples: float
    clip_fraction: float


def correct_rollouts(
    old_logprobs: NDArray[np.float32],
    rollout_logprobs: NDArray[np.float32],
    loss_mask: NDArray[np.bool_],
    config: RolloutCorrectionConfig,
) -> Correction:
    """Compute the importance weights of a batch.

    Args:
        old_logprobs: [num_samples, max_tokens], the trainer's; finite inside the mask.
        rollout_logprobs: [num_samples, max_tokens], the sampler's; finite inside the mask.
        loss_mask: [num_samples, max_tokens] True where the policy produced the token.
    """
    gap = np.where(loss_mask, old_logprobs.astype(np.float64) - rollout_logprobs, 0.0)
    assert np.isfinite(gap).all(), "the loop refuses log-probs that are not finite"
    ratio = np.exp(np.clip(_log_ratio(gap, loss_mask, config.level), -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    weights, is_out = _bounded(ratio, config)
    weights, is_out = np.where(loss_mask, weights, 0.0), is_out & loss_mask
    num_tokens = int(loss_mask.sum())
    if num_tokens == 0:
        return Correction(weights.astype(np.float32), 1.0, 0.0)
    squares = float(np.square(weights).sum())
    effective = float(weights.sum()) ** 2 / (num_tokens * squares) if squares else 0.0
    return Correction(weights.astype(np.float32), effective, float(is_out.sum() / num_tokens))


def _log_ratio(gap: NDArray[np.float64], loss_mask: NDArray[np.bool_], level: CorrectionLevel) -> NDArray[np.float64]:
    if level is CorrectionLevel.TOKEN:
        return gap
    totals: NDArray[np.float64] = gap.sum(axis=1, keepdims=True)
    if level is CorrectionLevel.GEOMETRIC:
        totals = totals / np.maximum(loss_mask.sum(axis=1, keepdims=True), 1)
    return np.broadcast_to(totals, gap.shape)


def _bounded(
    ratio: NDArray[np.float64], config: RolloutCorrectionConfig
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the weights, and where the ratio was out of bounds."""
    if config.method is CorrectionMethod.NONE:
        return np.ones_like(ratio), np.zeros(ratio.shape, dtype=np.bool_)
    if config.method is CorrectionMethod.TRUNCATE:
        return np.minimum(ratio, config.max_weight), ratio > config.max_weight
    is_out = (ratio < config.min_weight) | (ratio > config.max_weight)
    return np.where(is_out, 0.0, ratio), is_out
