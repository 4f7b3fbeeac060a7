"""What an advantage estimator sees, and what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.algorithm import AdvantageConfig


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The scored samples of one step.

    Attributes:
        rewards: [num_samples] float64, finite; the reward of each whole sample.
        group_ids: [num_samples] int64; equal for samples of one prompt; any integers, in any order.
        loss_mask: [num_samples, max_tokens] bool; True where the policy produced the token.
        kl_penalties: [num_samples, max_tokens] float64; what the KL to the reference takes off the reward of each token, 0
            without such a penalty and outside the mask.
        values: [num_samples, max_tokens] float64; the critic's value of the state before each token, finite inside the mask; None
            unless the estimator needs it.
        greedy_rewards: [num_samples] float64 reward of the greedy sample of each one's prompt, without penalties; None unless the
            estimator needs it.
    """

    rewards: NDArray[np.float64]
    group_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    kl_penalties: NDArray[np.float64]
    values: NDArray[np.float64] | None = None
    greedy_rewards: NDArray[np.float64] | None = None

    @property
    def penalised_rewards(self) -> NDArray[np.float64]:
        """[num_samples] float64; the reward of each sample less the penalties of all its tokens."""
        totals: NDArray[np.float64] = self.rewards - self.kl_penalties.sum(1)
        return totals


@dataclass(frozen=True, slots=True)
class AdvantagesAndReturns:
    """Of [num_samples, max_tokens] float64 each, 0 outside the mask.

    Attributes:
        returns: What the critic learns.
    """

    advantages: NDArray[np.float64]
    returns: NDArray[np.float64]


Estimator = Callable[[AdvantageInputs, AdvantageConfig], NDArray[np.float64] | AdvantagesAndReturns]
"""Returns [num_samples], one advantage for all tokens of a sample, or [num_samples, max_tokens]; returns as well when it needs values."""
