"""GAE: advantages per token from a critic's values.

``delta_t = r_t + discount V_{t+1} - V_t``, ``A_t = delta_t + discount trace_decay A_{t+1}``, ``return_t = A_t + V_t``, where
t + 1 is the next token that the policy produced: tokens of prompts and tools between turns take no time, have no value and
pass on what comes after them. After the last one, value and advantage are 0. The reward of the sample falls on its last
token, the KL penalty on each.

Source: arXiv 1506.02438, equation 16; token level: InstructGPT, arXiv 2203.02155, section 3.5.

Worked example: two tokens with values 0.5, 0.25, reward 1, discount 1, trace_decay 0.5: delta = -0.25, 0.75, so the
advantages are 0.125, 0.75 and the returns 0.625, 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrl.algos.advantage.inputs import AdvantageInputs
from hybridrl.algos.advantage.whiten import whiten


@dataclass(frozen=True, slots=True)
class GaeResult:
    """Of [num_samples, max_tokens] float64 each, 0 outside the mask.

    Attributes:
        advantages: Whitened when asked for.
        returns: What the critic learns; of the advantages before whitening.
    """

    advantages: NDArray[np.float64]
    returns: NDArray[np.float64]


def gae(
    inputs: AdvantageInputs,
    values: NDArray[np.float64],
    *,
    discount: float,
    trace_decay: float,
    whiten_epsilon: float | None = None,
) -> GaeResult:
    """Estimate advantages and returns.

    Args:
        values: [num_samples, max_tokens]; the critic's value of the state before each token; read inside the mask only.
        discount: Of the next token, in (0, 1].
        trace_decay: Lambda, in [0, 1].
        whiten_epsilon: Whiten advantages over the batch, with this beside the standard deviation; None leaves them.
    """
    mask = inputs.loss_mask
    num_samples, width = mask.shape
    advantages = np.zeros(mask.shape, dtype=np.float64)
    rewards = inputs.rewards.astype(np.float64)
    next_value, next_advantage = np.zeros(num_samples), np.zeros(num_samples)
    for token in reversed(range(width)):
        is_trained = mask[:, token]
        value = np.where(is_trained, values[:, token], 0.0)
        delta = rewards - inputs.kl_penalties[:, token] + discount * next_value - value
        advantage = delta + discount * trace_decay * next_advantage
        advantages[:, token] = np.where(is_trained, advantage, 0.0)
        next_value = np.where(is_trained, value, next_value)
        next_advantage = np.where(is_trained, advantage, next_advantage)
        rewards = np.where(is_trained, 0.0, rewards)
    returns = np.where(mask, advantages + np.where(mask, values, 0.0), 0.0)
    if whiten_epsilon is not None:
        advantages = whiten(advantages, mask, whiten_epsilon)
    return GaeResult(advantages, returns)
