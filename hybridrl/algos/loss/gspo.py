"""GSPO: the clipped surrogate with one ratio per sequence.

``L_t = -min(s A_t, clip(s, 1 - clip_low, 1 + clip_high) A_t)`` with ``s = exp(mean of log rho over the tokens of the
sequence)``. With ``loss_aggregation: seq_mean_token_mean`` this is the sequence loss of the paper.

Source: GSPO, arXiv 2507.18071, equations 5 and 7; the paper clips at 3e-4 and 4e-4.

Worked example: log rho 0.2 and -0.1 in one sequence: s = exp(0.05) = 1.0513 for both tokens.
"""

from __future__ import annotations

from hybridrl.algos.loss.clip import clipped_surrogate
from hybridrl.algos.loss.tokens import PolicyTokens, TokenLoss
from hybridrl.config.algorithm import PolicyLossConfig


def gspo(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLoss:
    """Clip the ratio of each sequence."""
    return clipped_surrogate(tokens.sequence_mean(tokens.log_ratio).exp(), tokens.advantages, config)
