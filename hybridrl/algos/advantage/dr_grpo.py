"""Dr. GRPO: rewards centred inside the group, not divided by its standard deviation, which favours easy and hard prompts.

``A_i = r_i - mean(r)``. The length-unbiased loss that belongs to it is ``loss_aggregation: seq_mean_token_sum_norm``.

Source: "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783, section 3.2.

Worked example: rewards 1, 0, 0, 1 have mean 0.5, so the advantages are 0.5, -0.5, -0.5, 0.5.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridrl.algos.advantage.groups import map_groups
from hybridrl.algos.advantage.inputs import AdvantageInputs
from hybridrl.config.algorithm import AdvantageConfig


def dr_grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> NDArray[np.float64]:
    """Return [num_samples] advantages; exactly 0 in a group of equal rewards."""
    return map_groups(inputs.penalised_rewards, inputs.group_ids, lambda rewards: rewards - rewards.mean())
