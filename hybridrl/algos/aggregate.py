"""Aggregation of token losses into one number, decided once for the whole global batch.

The loss is ``sum(weights * token_loss)`` over every token of every rank and micro-batch, so it depends neither on padding
nor on how the batch is split.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray


class LossAggregation(enum.Enum):
    """How token losses are averaged."""

    TOKEN_MEAN = "token_mean"


def token_mean_weights(loss_mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Weigh every trained token equally: 1 / N for N trained tokens in the global batch; all 0 when there are none.

    Source: DAPO, arXiv 2503.14476, section 3.3 (token-level policy gradient loss).

    Args:
        loss_mask: [num_samples, max_tokens] True where the policy produced the token.

    Returns:
        [num_samples, max_tokens] weights that sum to 1, or to 0 when every token is masked.
    """
    num_tokens = int(loss_mask.sum())
    return loss_mask.astype(np.float32) / np.float32(max(num_tokens, 1))


def loss_weights(aggregation: LossAggregation, loss_mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return [num_samples, max_tokens] weights of the token losses of a global batch."""
    return _AGGREGATIONS[aggregation](loss_mask)


_AGGREGATIONS: dict[LossAggregation, Callable[[NDArray[np.bool_]], NDArray[np.float32]]] = {
    LossAggregation.TOKEN_MEAN: token_mean_weights,
}
