"""ReMax: REINFORCE whose baseline is the reward of the greedy response to the same prompt.

``A_i = r_i - r_greedy(prompt of i)``.

Source: ReMax, arXiv 2310.10505, section 4.

Worked example: rewards 1, 0 of a prompt whose greedy response earns 0.25 give the advantages 0.75, -0.25.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hybridrl.algos.advantage.inputs import AdvantageInputs


def remax(inputs: AdvantageInputs, greedy_rewards: Mapping[int, float]) -> NDArray[np.float64]:
    """Return [num_samples] advantages.

    Args:
        greedy_rewards: Group id -> reward of the response that takes the likeliest token each time.
    """
    baselines = np.array([greedy_rewards[int(group)] for group in inputs.group_ids], dtype=np.float64)
    result: NDArray[np.float64] = inputs.penalised_rewards - baselines
    return result
