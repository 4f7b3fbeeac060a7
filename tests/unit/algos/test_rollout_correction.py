"""Importance weights against their definition, and at their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from hybridrl.algos.overlong import overlong_penalties
from hybridrl.algos.rollout_correction import Correction, correct_rollouts
from hybridrl.config.algorithm import OverlongConfig, RolloutCorrectionConfig
from hybridrl.config.choices import CorrectionLevel, CorrectionMethod
from tests.unit.algos.ragged import Ragged, ragged, random_cases

LOW, HIGH = 0.6, 1.7


def _config(method: CorrectionMethod, level: CorrectionLevel = CorrectionLevel.TOKEN) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(method=method, level=level, min_weight=LOW, max_weight=HIGH)


def _row(
    old: list[float], rollout: list[float], config: RolloutCorrectionConfig, mask: list[bool] | None = None
) -> Correction:
    arrays = [np.array([values], dtype=np.float32) for values in (old, rollout)]
    return correct_rollouts(*arrays, np.array([mask or [True] * len(old)]), config)


def _reference(gaps: np.ndarray, mask: np.ndarray, config: RolloutCorrectionConfig) -> tuple[np.ndarray, list[bool]]:
    weights, out = np.zeros(mask.shape), []
    for row in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[row, t]]
        total = math.fsum(gaps[row, t] for t in tokens)
        for t in tokens:
            log_ratio = {
                CorrectionLevel.TOKEN: gaps[row, t],
                CorrectionLevel.SEQUENCE: total,
                CorrectionLevel.GEOMETRIC: total / len(tokens),
            }[config.level]
            ratio = math.exp(log_ratio)
            if config.method is CorrectionMethod.NONE:
                ratio, is_out = 1.0, False
            elif config.method is CorrectionMethod.TRUNCATE:
                ratio, is_out = min(ratio, HIGH), ratio > HIGH
            else:
                ratio, is_out = (ratio, False) if LOW <= ratio <= HIGH else (0.0, True)
            weights[row, t] = ratio
            out.append(is_out)
    return weights, out


@pytest.mark.parametrize("method", CorrectionMethod)
@pytest.mark.parametrize("level", CorrectionLevel)
@random_cases
@given(batch=ragged())
def test_weights_and_counts_equal_the_reference(
    method: CorrectionMethod, level: CorrectionLevel, batch: Ragged
) -> None:
    config = _config(method, level)
    rollout, gaps = batch.floats(1.0).astype(np.float32), batch.floats(0.4)
    old = (rollout + np.where(batch.mask, gaps, 0)).astype(np.float32)
    weights, is_out = _reference(old.astype(float) - rollout, batch.mask, config)
    got = correct_rollouts(old, rollout, batch.mask, config)
    np.testing.assert_allclose(got.weights, weights, rtol=1e-5)
    if is_out:
        trained = weights[batch.mask]
        squares = float((trained**2).sum())
        effective = float(trained.sum()) ** 2 / len(trained) / squares if squares else 0.0
        assert got.effective_samples == pytest.approx(effective)
        assert got.clip_fraction == pytest.approx(sum(is_out) / len(is_out))
    else:
        assert (got.effective_samples, got.clip_fraction) == (1.0, 0.0)


@pytest.mark.parametrize("method", CorrectionMethod)
@pytest.mark.parametrize("level", CorrectionLevel)
def test_agreement_is_exactly_one_and_masked_tokens_are_zero(method: CorrectionMethod, level: CorrectionLevel) -> None:
    got = _row([-0.7, math.nan], [-0.7, -1.0], _config(method, level), [True, False])
    assert got.weights.tolist() == [[1.0, 0.0]]
    assert (got.effective_samples, got.clip_fraction) == (1.0, 0.0)


@pytest.mark.parametrize("level", CorrectionLevel)
def test_huge_gaps_stay_finite(level: CorrectionLevel) -> None:
    got = _row([0.0, 0.0], [-1e4, -1e4], _config(CorrectionMethod.TRUNCATE, level))
    np.testing.assert_allclose(got.weights, [[HIGH, HIGH]], rtol=1e-6)
    assert _row([0.0], [-1e4], _config(CorrectionMethod.MASK, level)).effective_samples == 0.0


def test_the_effective_share_of_one_weight_among_many_is_one_over_their_number() -> None:
    got = _row([0.0, -50.0, -50.0, -50.0], [0.0] * 4, _config(CorrectionMethod.TRUNCATE))
    assert got.effective_samples == pytest.approx(0.25)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_log_prob_that_is_not_finite_never_becomes_a_weight(value: float) -> None:
    with pytest.raises(AssertionError, match="not finite"):
        _row([value], [0.0], _config(CorrectionMethod.MASK))


def test_overlong_responses_are_charged_over_the_buffer() -> None:
    lengths = np.array([0, 16, 17, 18, 20, 25])
    soft = overlong_penalties(lengths, OverlongConfig(max_tokens=20, buffer_tokens=4, penalty=2.0))
    assert soft.tolist() == [0, 0, 0.5, 1.0, 2.0, 2.0]
    assert overlong_penalties(lengths, OverlongConfig(max_tokens=20)).tolist() == [0, 0, 0, 0, 1, 1]
    assert overlong_penalties(lengths, OverlongConfig()).tolist() == [0.0] * 6
