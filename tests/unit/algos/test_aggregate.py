"""Loss weights depend on the global batch only."""

from __future__ import annotations

import numpy as np

from hybridrl.algos.aggregate import LossAggregation, loss_weights, token_mean_weights


def test_every_trained_token_of_the_batch_weighs_the_same() -> None:
    mask = np.array([[False, True, True, True], [False, False, True, False]])
    np.testing.assert_array_equal(token_mean_weights(mask), mask * np.float32(0.25))
    np.testing.assert_array_equal(loss_weights(LossAggregation.TOKEN_MEAN, mask), mask * np.float32(0.25))


def test_padding_does_not_change_the_weights() -> None:
    mask = np.random.default_rng(0).random((6, 9)) < 0.5
    wide = np.pad(mask, ((0, 0), (0, 5)))
    np.testing.assert_array_equal(token_mean_weights(wide)[:, :9], token_mean_weights(mask))


def test_an_all_masked_batch_weighs_nothing() -> None:
    weights = token_mean_weights(np.zeros((3, 4), dtype=bool))
    assert weights.dtype == np.float32
    assert (weights == 0).all()
