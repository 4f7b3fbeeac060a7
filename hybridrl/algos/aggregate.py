"""Aggregation of token losses into one number, decided once for the whole global batch.

The loss is ``sum(weights * token_loss)`` over every token of every rank and micro-batch, so it depends neither on padding
nor on how the batch is split. With N trained tokens, S sequences that have one, and n trained tokens in a token's sequence,
the weight of that token is

    token_mean               1 / N              DAPO, arXiv 2503.14476, section 3.3
    seq_mean_token_mean      1 / (S n)          GRPO, arXiv 2402.03300, equation 3
    seq_mean_token_sum       1 / S              REINFORCE over whole sequences
    seq_mean_token_sum_norm  1 / (S constant)   Dr. GRPO, arXiv 2503.20783, listing 1

Worked example: sequences of 1 and 3 trained tokens get the weights 1/4; 1/4, 1/4, 1/4, then 1/2; 1/6, 1/6, 1/6, then 1/2
each, and with the constant 4, 1/8 each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.choices import LossAggregation


def loss_weights(
    aggregation: LossAggregation, loss_mask: NDArray[np.bool_], norm_tokens: int | None = None
) -> NDArray[np.float32]:
    """Weigh the token losses of a global batch.

    Args:
        loss_mask: [num_samples, max_tokens] True where the policy produced the token.
        norm_tokens: The constant of SEQ_MEAN_TOKEN_SUM_NORM.

    Returns:
        [num_samples, max_tokens] weights; 0 outside the mask, and everywhere when every token is masked. A sequence
        without a trained token is not counted.
    """
    num_tokens = loss_mask.sum(axis=1)
    divisors = _DIVISORS[aggregation](num_tokens, norm_tokens)
    weights = np.zeros(loss_mask.shape, dtype=np.float32)
    np.divide(loss_mask, divisors, out=weights, where=loss_mask, dtype=np.float32)
    return weights


def _token_mean(num_tokens: NDArray[np.int64], norm_tokens: int | None) -> NDArray[np.float32]:
    return np.full((1, 1), num_tokens.sum(), dtype=np.float32)


def _seq_mean_token_mean(num_tokens: NDArray[np.int64], norm_tokens: int | None) -> NDArray[np.float32]:
    return (np.count_nonzero(num_tokens) * num_tokens)[:, None].astype(np.float32)


def _seq_mean_token_sum(num_tokens: NDArray[np.int64], norm_tokens: int | None) -> NDArray[np.float32]:
    return np.full((1, 1), np.count_nonzero(num_tokens), dtype=np.float32)


def _seq_mean_token_sum_norm(num_tokens: NDArray[np.int64], norm_tokens: int | None) -> NDArray[np.float32]:
    assert norm_tokens is not None, "seq_mean_token_sum_norm needs loss_norm_tokens"
    return _seq_mean_token_sum(num_tokens, norm_tokens) * np.float32(norm_tokens)


_DIVISORS: dict[LossAggregation, Callable[[NDArray[np.int64], int | None], NDArray[np.float32]]] = {
    LossAggregation.TOKEN_MEAN: _token_mean,
    LossAggregation.SEQ_MEAN_TOKEN_MEAN: _seq_mean_token_mean,
    LossAggregation.SEQ_MEAN_TOKEN_SUM: _seq_mean_token_sum,
    LossAggregation.SEQ_MEAN_TOKEN_SUM_NORM: _seq_mean_token_sum_norm,
}
