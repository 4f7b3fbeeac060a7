"""Truncated importance weights against their definition and at their edges."""

import math

import numpy as np

from hybridrl.algos.importance import truncated_importance_weights


def weights(old, rollout, mask, max_weight=2.0):
    arrays = [np.array([values], dtype=np.float32) for values in (old, rollout)]
    return truncated_importance_weights(*arrays, np.array([mask]), max_weight)[0]


def test_weights_are_truncated_ratios():
    got = weights([-1.0, -1.0, -3.0], [-1.0, -2.0, -2.0], [True] * 3)
    np.testing.assert_allclose(got, [1.0, 2.0, math.exp(-1)], rtol=1e-6)  # exp(1) is cut to 2


def test_agreement_is_exactly_one_and_masked_tokens_are_zero():
    assert weights([-0.7, -5.0], [-0.7, -1.0], [True, False]).tolist() == [1.0, 0.0]


def test_huge_gaps_stay_finite():
    assert weights([0.0, -1000.0], [-1000.0, 0.0], [True, True]).tolist() == [2.0, 0.0]
