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

import numpy as np

from hybridrl.algos.advantage.inputs import AdvantageInputs, AdvantagesAndReturns
from hybridrl.algos.advantage.whiten import whiten
from hybridrl.config.algorithm import AdvantageConfig


def gae(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantagesAndReturns:
    """Return advantages, whitened over the batch when configured so, and the returns of those before whitening."""
    assert inputs.values is not None, "gae needs a critic"
    mask, values, discount = inputs.loss_mask, inputs.values, config.discount
    num_samples, width = mask.shape
    advantages = np.zeros(mask.shape, dtype=np.float64)
    rewards = inputs.rewards.astype(np.float64)
    next_value, next_advantage = np.zeros(num_samples), np.zeros(num_samples)
    for token in reversed(range(width)):
        is_trained = mask[:, token]
        value = np.where(is_trained, values[:, token], 0.0)
        delta = rewards - inputs.kl_penalties[:, token] + discount * next_value - value
        advantage = delta + discount * config.trace_decay * next_advantage
        advantages[:, token] = np.where(is_trained, advantage, 0.0)
        next_value = np.where(is_trained, value, next_value)
        next_advantage = np.where(is_trained, advantage, next_advantage)
        rewards = np.where(is_trained, 0.0, rewards)
    returns = np.where(mask, advantages + np.where(mask, values, 0.0), 0.0)
    if config.whiten:
        advantages = whiten(advantages, mask, config.epsilon)
    return AdvantagesAndReturns(advantages, returns)
