"""The policy loss per token, with a clipped ratio.

``L_t = -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)`` with ``rho_t = exp(logprobs_t - old_logprobs_t)``.
An engine adds ``kl_coef k3_t - entropy_coef H_t`` where the coefficients are not 0, weighs the tokens (``aggregate.py``)
and sums them.

Source: PPO, arXiv 1707.06347, equation 7; asymmetric clip: DAPO, arXiv 2503.14476, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridrl.algos.kl import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """Coefficients of the policy loss.

    Attributes:
        clip_low: The ratio is clipped below 1 - clip_low.
        clip_high: The ratio is clipped above 1 + clip_high.
        kl_coef: Weight of the k3 term; 0 needs no ref_logprobs.
        entropy_coef: Weight of the entropy bonus.
    """

    clip_low: float
    clip_high: float
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


def policy_token_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Return the clipped surrogate loss per token.

    Args:
        logprobs: [...] log-probs under the policy being trained.
        old_logprobs: [...] log-probs of the same tokens before the update.
        advantages: [...] advantage of each token.

    Returns:
        [...] loss, differentiable in `logprobs`; its gradient is 0 where the clip holds.
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)
