"""Estimators of the KL divergence from the policy to the reference, per token.

Source: J. Schulman, "Approximating KL Divergence", 2020 (k1, k2, k3).
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this magnitude before exp: exp(20) is 4.9e8, far past any clip, and finite in bf16."""


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return ``exp(d) - d - 1`` with ``d = ref_logprobs - logprobs``: unbiased, never negative, 0 where the two agree.

    Args:
        logprobs: [...] log-probs under the policy, of tokens that the policy sampled.
        ref_logprobs: [...] log-probs of the same tokens under the reference.

    Returns:
        [...] KL estimate per token, differentiable in `logprobs`.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio
