"""GRPO: advantages normalised inside the group of samples of one prompt.

``A_i = (r_i - mean(r)) / (std(r) + epsilon)`` with the sample standard deviation (n - 1 in the denominator).

Source: DeepSeekMath, arXiv 2402.03300, section 4.1 (outcome supervision).

Worked example: rewards 1, 0, 0, 1 have mean 0.5 and std 0.5774, so the advantages are 0.866, -0.866, -0.866, 0.866 for a
small epsilon.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridrl.algos.advantage.groups import map_groups
from hybridrl.algos.advantage.inputs import AdvantageInputs
from hybridrl.config.algorithm import AdvantageConfig


def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> NDArray[np.float64]:
    """Return [num_samples] advantages; exactly 0 in a group of equal rewards."""

    def normalised(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        result: NDArray[np.float64] = (rewards - rewards.mean()) / (rewards.std(ddof=1) + config.epsilon)
        return result

    return map_groups(inputs.penalised_rewards, inputs.group_ids, normalised)
