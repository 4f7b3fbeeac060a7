"""The clipped surrogate of PPO, with separate bounds, and its dual-clip variant.

``L_t = -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)`` with ``rho_t = exp(logprobs_t - old_logprobs_t)``.
Dual clip bounds the loss of a bad token that became much likelier: where A_t < 0, ``L_t = min(L_t, -dual_clip A_t)``.

Sources: PPO, arXiv 1707.06347, equation 7; separate bounds: DAPO, arXiv 2503.14476, section 3.1; dual clip: arXiv 1912.09729,
equation 5.

Worked example: clip_low 0.2, clip_high 0.28, dual_clip 3: rho 1.5 with A 1 has loss -1.28, flat; rho 1.5 with A -1 has loss
1.5; rho 4 with A -1 has loss 4, with dual clip 3, flat.
"""

from __future__ import annotations

import torch

from hybridrl.algos.loss.tokens import PolicyTokens, TokenLoss
from hybridrl.config.algorithm import PolicyLossConfig


def clip(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLoss:
    """Clip the ratio of each token."""
    return clipped_surrogate(tokens.log_ratio.exp(), tokens.advantages, config)


def dual_clip(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLoss:
    """Clip the ratio of each token, and bound it where the advantage is negative."""
    single = clip(tokens, config)
    bound = -config.dual_clip * tokens.advantages
    is_bounded = (tokens.advantages < 0) & (single.loss.detach() > bound)
    return TokenLoss(torch.where(is_bounded, bound, single.loss), single.is_clipped | is_bounded)


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, config: PolicyLossConfig) -> TokenLoss:
    """Return the pessimistic one of the plain and the clipped surrogate.

    Args:
        ratio: [num_tokens] of the token, or of its sequence; differentiable.
        advantages: [num_tokens].
    """
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    is_clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    return TokenLoss(loss, is_clipped)
