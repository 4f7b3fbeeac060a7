"""GRPO: advantages normalised inside the group of samples of one prompt.

``A_i = (r_i - mean(r)) / (std(r) + epsilon)`` with the sample standard deviation (n - 1 in the denominator).

Source: DeepSeekMath, arXiv 2402.03300, section 4.1 (outcome supervision).

Worked example: rewards 1, 0, 0, 1 have mean 0.5 and std 0.5774, so the advantages are 0.866, -0.866, -0.866, 0.866 for a
small epsilon.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridrl.algos.advantages import Advantages


def group_advantages(rewards: NDArray[np.float64], group_ids: NDArray[np.int64], epsilon: float) -> Advantages:
    """Normalise rewards by group. Equal rewards, and a group of one sample, give exactly 0 and are counted.

    Args:
        rewards: [num_samples] finite rewards.
        group_ids: [num_samples] equal for samples of one prompt; any integers, in any order.
        epsilon: Added to the group's standard deviation.
    """
    assert rewards.shape == group_ids.shape, (rewards.shape, group_ids.shape)
    assert np.isfinite(rewards).all(), rewards
    values = np.zeros(len(rewards), dtype=np.float64)
    groups = np.unique(group_ids)
    num_zero_groups = 0
    for group in groups:
        rows = group_ids == group
        members = rewards[rows].astype(np.float64)
        if (members == members[0]).all():
            num_zero_groups += 1
            continue
        values[rows] = (members - members.mean()) / (members.std(ddof=1) + epsilon)
    return Advantages(values.astype(np.float32), len(groups), num_zero_groups)
