"""Groups: the samples of one prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def map_groups(rewards: Floats, group_ids: NDArray[np.int64], advantages_of: Callable[[Floats], Floats]) -> Floats:
    """Compute advantages group by group.

    A group whose rewards are all equal, one of a single sample included, gets exactly 0 without being computed: rounding of
    its mean must not teach anything.

    Args:
        rewards: [num_samples].
        group_ids: [num_samples] any integers, in any order.
        advantages_of: [group_size] rewards of a group -> [group_size].

    Returns:
        [num_samples].
    """
    assert rewards.shape == group_ids.shape, (rewards.shape, group_ids.shape)
    values = np.zeros(len(rewards), dtype=np.float64)
    for group in np.unique(group_ids):
        rows = group_ids == group
        members = rewards[rows]
        if (members != members[0]).any():
            values[rows] = advantages_of(members)
    return values
