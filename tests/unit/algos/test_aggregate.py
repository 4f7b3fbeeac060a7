"""Loss weights against the definition of each average, and what they do not depend on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from hybridrl.algos.aggregate import loss_weights
from hybridrl.config.choices import LossAggregation
from tests.unit.algos.ragged import Ragged, ragged, random_cases

NORM = 11


def _reference(aggregation: LossAggregation, losses: np.ndarray, mask: np.ndarray) -> float:
    sequences = [
        [float(x) for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(losses, mask, strict=True)
    ]
    sequences = [sequence for sequence in sequences if sequence]
    if not sequences:
        return 0.0
    tokens = [x for sequence in sequences for x in sequence]
    totals = [sum(sequence) for sequence in sequences]
    return {
        LossAggregation.TOKEN_MEAN: sum(tokens) / len(tokens),
        LossAggregation.SEQ_MEAN_TOKEN_MEAN: sum(sum(s) / len(s) for s in sequences) / len(sequences),
        LossAggregation.SEQ_MEAN_TOKEN_SUM: sum(totals) / len(totals),
        LossAggregation.SEQ_MEAN_TOKEN_SUM_NORM: sum(totals) / NORM / len(totals),
    }[aggregation]


@pytest.mark.parametrize("aggregation", LossAggregation)
@random_cases
@given(batch=ragged())
def test_the_weighted_sum_is_the_average_whatever_the_padding_and_the_split(
    aggregation: LossAggregation, batch: Ragged
) -> None:
    losses = batch.floats(1.0)
    weights = loss_weights(aggregation, batch.mask, NORM)
    assert weights.dtype == np.float32 and (weights[~batch.mask] == 0).all()
    expected = _reference(aggregation, losses, batch.mask)
    assert float((weights * losses).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for parts in (2, 3):
        rows = np.array_split(np.arange(len(losses)), parts)
        assert sum(float((weights[r] * losses[r]).sum()) for r in rows) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    wide = loss_weights(aggregation, np.pad(batch.mask, ((0, 0), (1, 4))), NORM)
    np.testing.assert_array_equal(wide[:, 1:-4], weights)


@pytest.mark.parametrize("aggregation", LossAggregation)
def test_an_all_masked_batch_weighs_nothing(aggregation: LossAggregation) -> None:
    assert (loss_weights(aggregation, np.zeros((3, 4), dtype=bool), NORM) == 0).all()


@pytest.mark.parametrize("aggregation", LossAggregation)
def test_an_empty_response_changes_no_weight(aggregation: LossAggregation) -> None:
    mask = np.array([[True, True, False], [True, True, True]])
    with_empty = np.vstack([mask, np.zeros((1, 3), dtype=bool)])
    np.testing.assert_array_equal(
        loss_weights(aggregation, with_empty, NORM)[:2], loss_weights(aggregation, mask, NORM)
    )


def test_the_worked_example() -> None:
    mask = np.array([[True, False, False], [True, True, True]])
    weigh = {each: loss_weights(each, mask, 4)[:, 0].tolist() for each in LossAggregation}
    assert weigh == {
        LossAggregation.TOKEN_MEAN: [1 / 4, 1 / 4],
        LossAggregation.SEQ_MEAN_TOKEN_MEAN: [1 / 2, pytest.approx(1 / 6)],
        LossAggregation.SEQ_MEAN_TOKEN_SUM: [1 / 2, 1 / 2],
        LossAggregation.SEQ_MEAN_TOKEN_SUM_NORM: [1 / 8, 1 / 8],
    }
