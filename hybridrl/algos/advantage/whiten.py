"""Whitening over the trained tokens of a global batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def whiten(values: NDArray[np.float64], loss_mask: NDArray[np.bool_], epsilon: float) -> NDArray[np.float64]:
    """Return ``(values - mean) / (std + epsilon)`` over the tokens of the mask, and 0 elsewhere.

    Equal values, those of a single token included, give exactly 0.

    Args:
        values: [num_samples, max_tokens]; not read outside the mask.
        loss_mask: [num_samples, max_tokens].

    Returns:
        [num_samples, max_tokens].
    """
    result = np.zeros(loss_mask.shape, dtype=np.float64)
    trained = values[loss_mask]
    if trained.size and (trained != trained[0]).any():
        result[loss_mask] = (trained - trained.mean()) / (trained.std() + epsilon)
    return result
