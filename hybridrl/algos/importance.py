"""Importance weights between the sampler and the trainer's policy before the update.

They repair what the clipped ratio does not see: tokens that an older version sampled (``max_policy_lag`` above 0) and
numerical differences between the two engines.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def truncated_importance_weights(
    old_logprobs: NDArray[np.float32],
    rollout_logprobs: NDArray[np.float32],
    loss_mask: NDArray[np.bool_],
    max_weight: float,
) -> NDArray[np.float32]:
    """Return min(exp(old - rollout), max_weight) per token, and 0 outside the mask.

    The gradient of token t is weighed by the probability of its action under the policy that trains, relative to the policy
    that sampled it; truncation bounds the variance at the price of a bias towards frequent tokens.

    Source: truncated importance sampling, Ionides 2008.

    Args:
        old_logprobs: [num_samples, max_tokens], the trainer's.
        rollout_logprobs: [num_samples, max_tokens], the sampler's.
        loss_mask: [num_samples, max_tokens] True where the policy produced the token.
        max_weight: Bound, at least 1.

    Returns:
        [num_samples, max_tokens] weights; exactly 1 where the two agree.
    """
    gap = np.where(loss_mask, old_logprobs.astype(np.float64) - rollout_logprobs, 0.0)
    weights = np.exp(np.minimum(gap, np.log(max_weight)))
    return np.where(loss_mask, weights, 0.0).astype(np.float32)
