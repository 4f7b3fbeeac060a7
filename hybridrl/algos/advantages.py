"""Advantages by name: the one dispatch from a configured estimator to its file.

A new estimator is one small file with a function of the :data:`Estimator` type, and one line in the table below.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class AdvantageEstimator(enum.Enum):
    """How rewards become advantages."""

    GRPO = "grpo"


@dataclass(frozen=True, slots=True)
class Advantages:
    """One advantage per sample, and what the estimator counted.

    Attributes:
        values: [num_samples] float32.
        num_groups: Groups of samples of one prompt.
        num_zero_groups: Groups that teach nothing, because all their advantages are exactly 0.
    """

    values: NDArray[np.float32]
    num_groups: int
    num_zero_groups: int


Estimator = Callable[[NDArray[np.float64], NDArray[np.int64], float], Advantages]


def estimate_advantages(
    estimator: AdvantageEstimator, rewards: NDArray[np.float64], group_ids: NDArray[np.int64], epsilon: float
) -> Advantages:
    """Turn rewards into one advantage per sample.

    Args:
        rewards: [num_samples] finite rewards.
        group_ids: [num_samples] equal for samples of one prompt; any integers, in any order.
        epsilon: Added to a standard deviation before it divides.
    """
    from hybridrl.algos import grpo

    estimators: dict[AdvantageEstimator, Estimator] = {AdvantageEstimator.GRPO: grpo.group_advantages}
    return estimators[estimator](rewards, group_ids, epsilon)
