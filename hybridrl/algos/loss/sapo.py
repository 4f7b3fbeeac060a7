"""SAPO: a smooth gate in the place of clipping, steeper for negative advantages.

``L_t = -(4 / tau) sigmoid(tau (rho_t - 1)) A_t`` with tau = positive_temperature where A_t > 0 and negative_temperature
elsewhere. At rho = 1 its gradient is the plain policy gradient, and it decays smoothly on both sides.

Source: "Soft Adaptive Policy Optimization", arXiv 2511.20347, equations 5 to 7.

Worked example: tau 1, A 1: rho 1 has loss -2 and slope -1; rho 3 has loss -3.52 and slope -0.42.
"""

from __future__ import annotations

import torch

from hybridrl.algos.loss.tokens import PolicyTokens, TokenLoss
from hybridrl.config.algorithm import PolicyLossConfig


def sapo(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLoss:
    """Gate the ratio of each token; nothing is clipped."""
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    positive, negative = (ratio.new_tensor(x) for x in (config.positive_temperature, config.negative_temperature))
    temperature = torch.where(advantages > 0, positive, negative)
    gate = torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature
    return TokenLoss(-gate * advantages, torch.zeros_like(ratio, dtype=torch.bool))
