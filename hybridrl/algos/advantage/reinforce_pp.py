"""REINFORCE++: no critic and no groups; returns normalised over all tokens of the global batch.

``R_t = r - sum(kl_s for s >= t)``, ``A_t = (R_t - mean(R)) / (std(R) + epsilon)`` over the trained tokens of all samples.
The KL penalty of a token is charged to that token and those before it, so that credit is per token.

The baseline variant centres rewards inside each group first and then divides by one scale for the whole batch:
``A_i = a_i / (std(a) + epsilon)`` with ``a_i = r_i - mean(r of its group)``, over samples. The mean of all ``a_i`` is 0, so
nothing else is subtracted, and a group of equal rewards keeps exactly 0.

Source: REINFORCE++, arXiv 2501.03262, section 3.

Worked example: two samples of 1 and 3 tokens with rewards 1 and 0 and no KL have the returns 1; 0, 0, 0, with mean 0.25 and
std 0.433, so the advantages are 1.732; -0.577, -0.577, -0.577. With the baseline, if both belong to one prompt, a = 0.5,
-0.5 has std 0.5, so the advantages are 1 and -1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridrl.algos.advantage.groups import map_groups
from hybridrl.algos.advantage.inputs import AdvantageInputs
from hybridrl.algos.advantage.whiten import whiten
from hybridrl.config.algorithm import AdvantageConfig


def reinforce_pp(inputs: AdvantageInputs, config: AdvantageConfig) -> NDArray[np.float64]:
    """Return [num_samples, max_tokens] advantages; exactly 0 when all returns of the batch are equal."""
    penalties = np.where(inputs.loss_mask, inputs.kl_penalties, 0.0)
    penalties_to_come = np.cumsum(penalties[:, ::-1], axis=1)[:, ::-1]
    return whiten(inputs.rewards[:, None] - penalties_to_come, inputs.loss_mask, config.epsilon)


def reinforce_pp_baseline(inputs: AdvantageInputs, config: AdvantageConfig) -> NDArray[np.float64]:
    """Return [num_samples] advantages; exactly 0 in a group of equal rewards."""
    centred = map_groups(inputs.penalised_rewards, inputs.group_ids, lambda rewards: rewards - rewards.mean())
    scale = np.sqrt(np.mean(centred**2)) + config.epsilon
    advantages: NDArray[np.float64] = centred / scale if scale > 0 else centred
    return advantages
