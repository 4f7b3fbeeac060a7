"""RLOO: REINFORCE whose baseline for a sample is the mean reward of the other samples of its prompt.

``A_i = r_i - (sum(r) - r_i) / (n - 1) = n / (n - 1) (r_i - mean(r))``: unbiased, as the baseline does not see the sample.

Source: "Back to Basics: Revisiting REINFORCE Style Optimization", arXiv 2402.14740, equation 8.

Worked example: rewards 1, 0, 0 have baselines 0, 0.5, 0.5, so the advantages are 1, -0.5, -0.5.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridrl.algos.advantage.groups import map_groups
from hybridrl.algos.advantage.inputs import AdvantageInputs
from hybridrl.config.algorithm import AdvantageConfig


def rloo(inputs: AdvantageInputs, config: AdvantageConfig) -> NDArray[np.float64]:
    """Return [num_samples] advantages; exactly 0 in a group of equal rewards."""

    def less_the_others(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        baselines = (rewards.sum() - rewards) / (len(rewards) - 1)
        result: NDArray[np.float64] = rewards - baselines
        return result

    return map_groups(inputs.penalised_rewards, inputs.group_ids, less_the_others)
