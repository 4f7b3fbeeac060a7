"""Overlong shaping: a reward penalty that grows linearly over the last tokens before a limit.

``penalty_i = penalty * clip((n_i - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1)`` for n_i policy tokens; without a
buffer, the whole penalty from max_tokens on.

Source: DAPO, arXiv 2503.14476, section 3.4 (soft overlong punishment).

Worked example: max_tokens 20, buffer_tokens 4, penalty 1: 16 tokens cost 0, 18 cost 0.5, 20 and more cost 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.algorithm import OverlongConfig


def overlong_penalties(num_tokens: NDArray[np.int64], config: OverlongConfig) -> NDArray[np.float64]:
    """Return the [num_samples] reward to take off; all 0 when `max_tokens` is null.

    Args:
        num_tokens: [num_samples] policy tokens of each sample, over all turns.
    """
    if config.max_tokens is None:
        return np.zeros(len(num_tokens), dtype=np.float64)
    if config.buffer_tokens == 0:
        return np.where(num_tokens >= config.max_tokens, config.penalty, 0.0)
    excess = (num_tokens - (config.max_tokens - config.buffer_tokens)) / config.buffer_tokens
    penalties: NDArray[np.float64] = config.penalty * np.clip(excess, 0.0, 1.0)
    return penalties
