"""CISPO: the clipped ratio is a constant weight of the policy gradient, so that every token keeps a gradient.

``L_t = -sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_t logprobs_t``; clip_low 1 leaves the lower side open, as the paper does.

Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5.

Worked example: rho 1.5, A 2, logprob -1, clip_high 0.28: loss 1.28 * 2 * 1 = 2.56, gradient -2.56.
"""

from __future__ import annotations

from hybridrl.algos.loss.tokens import PolicyTokens, TokenLoss
from hybridrl.config.algorithm import PolicyLossConfig


def cispo(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLoss:
    """Weigh the policy gradient by the clipped ratio; `is_clipped` says where the weight was cut."""
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, weight != ratio)
