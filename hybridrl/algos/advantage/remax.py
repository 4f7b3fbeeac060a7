"""ReMax: REINFORCE whose baseline is the reward of the greedy response to the same prompt.

``A_i = r_i - r_greedy(prompt of i)``. Penalties on length or KL are taken off r_i alone: a baseline that does not depend on the sample
leaves the gradient unbiased.

Source: ReMax, arXiv 2310.10505, section 4.

Worked example: rewards 1, 0 of a prompt whose greedy response earns 0.25 give the advantages 0.75, -0.25.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridrl.algos.advantage.inputs import AdvantageInputs
from hybridrl.config.algorithm import AdvantageConfig


def remax(inputs: AdvantageInputs, config: AdvantageConfig) -> NDArray[np.float64]:
    """Return [num_samples] advantages; exactly 0 where a sample earns what the greedy one does."""
    assert inputs.greedy_rewards is not None, "remax needs a greedy sample of each prompt"
    result: NDArray[np.float64] = inputs.penalised_rewards - inputs.greedy_rewards
    return result
