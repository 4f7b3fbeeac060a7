"""An algorithm of one's own: advantages from ranks, and a policy loss without a ratio."""

import numpy as np
import torch

from hybridrl.algos.advantage.groups import Floats, map_groups
from hybridrl.algos.advantage.inputs import AdvantageInputs
from hybridrl.algos.policy_loss import PolicyTokens, TokenLoss
from hybridrl.config.algorithm import AdvantageConfig, PolicyLossConfig


def rank_advantage(inputs: AdvantageInputs, config: AdvantageConfig) -> Floats:
    """Place the samples of a prompt evenly from -1 (worst) to 1 (best), whatever the distances between their rewards.

    inputs.rewards [num_samples], .group_ids [num_samples], .loss_mask and .kl_penalties [num_samples, max_tokens].
    """

    def ranked(rewards: Floats) -> Floats:
        signs = np.sign(rewards[:, None] - rewards[None])
        return signs.sum(1) / (len(rewards) - 1)

    return map_groups(inputs.rewards, inputs.group_ids, ranked)


def reinforce_loss(tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLoss:
    """Return the plain policy gradient; nothing is clipped.

    tokens.logprobs, .old_logprobs, .advantages, .segments [num_tokens]; config is the section algorithm.policy_loss.
    """
    loss = -tokens.advantages * tokens.logprobs
    return TokenLoss(loss, is_clipped=torch.zeros_like(loss, dtype=torch.bool))
