"""GMPO: the geometric mean over a sequence of ratios that are clipped token by token.

``L_t = -exp(mean of c over the tokens of the sequence) A_t`` with ``c_t = min(l_t, log(1 + clip_high))`` where A_t > 0,
``max(l_t, log(1 - clip_low))`` where A_t < 0, and ``l_t = log rho_t`` where A_t = 0. With ``loss_aggregation:
seq_mean_token_mean`` this is the sequence loss of the paper.

Source: "Geometric-Mean Policy Optimization", arXiv 2507.20673, equation 4; the paper clips at exp(-0.4) and exp(0.4), that is
clip_low 0.33 and clip_high 0.49.

Worked example: rho 1.1 and 2 in one sequence with A 1, clip_high 0.49: exp((log 1.1 + log 1.49) / 2) = 1.280, so the loss is
-1.280 at both tokens, and the second log-prob has no gradient.
"""

from __future__ import annotations

import torch

from hybridrl.algos.loss.tokens import PolicyTokens, TokenLoss
from hybridrl.config.algorithm import PolicyLossConfig


def gmpo(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLoss:
    """Clip the ratio of each token, and multiply over the sequence."""
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    low, high = (log_ratio.new_tensor(bound).log() for bound in (1.0 - config.clip_low, 1.0 + config.clip_high))
    is_clipped = ((log_ratio > high) & (advantages > 0)) | ((log_ratio < low) & (advantages < 0))
    bound = torch.where(advantages > 0, high, low)
    clipped = torch.where(is_clipped, bound, log_ratio)
    return TokenLoss(-tokens.sequence_mean(clipped).exp() * advantages, is_clipped)
