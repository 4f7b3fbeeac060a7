"""The mismatch figures against plain formulas, and their defined values where there is nothing to compare."""

import math

import numpy as np
import pytest

from hybridrl.controller.mismatch import Mismatch, measure


def test_figures_of_a_worked_example():
    sampler = np.log(np.array([0.5, 0.25, 0.8, 0.1], dtype=np.float32))
    trainer = np.log(np.array([0.5, 0.20, 0.9, 0.3], dtype=np.float32))
    gaps = [math.log(b / a) for a, b in zip([0.5, 0.25, 0.8, 0.1], [0.5, 0.20, 0.9, 0.3], strict=True)]
    found = measure(sampler, trainer)
    assert found.abs_max == pytest.approx(math.log(3), rel=1e-5)
    assert found.abs_mean == pytest.approx(sum(map(abs, gaps)) / 4, rel=1e-5)
    assert found.kl_k3 == pytest.approx(sum(math.exp(gap) - gap - 1 for gap in gaps) / 4, rel=1e-5)
    assert found.pearson == pytest.approx(np.corrcoef(np.exp(sampler), np.exp(trainer))[0, 1], rel=1e-5)
    assert found.large_share == 0.75


def test_equal_policies_show_no_mismatch():
    logprobs = np.log(np.array([0.5, 0.25, 0.8], dtype=np.float32))
    assert measure(logprobs, logprobs) == Mismatch(0.0, 0.0, 0.0, pytest.approx(1.0), 0.0)


@pytest.mark.parametrize(("trainer", "pearson"), [(-1.0, 1.0), (-2.0, 0.0)])
def test_constants_correlate_only_with_themselves(trainer, pearson):
    assert measure(np.full(3, -1.0, np.float32), np.full(3, trainer, np.float32)).pearson == pearson


def test_without_tokens_there_is_no_mismatch():
    nothing = np.zeros(0, np.float32)
    assert measure(nothing, nothing) == Mismatch(0.0, 0.0, 0.0, 1.0, 0.0)


def test_an_impossible_token_keeps_the_divergence_finite():
    assert math.isfinite(measure(np.array([-2e3], np.float32), np.array([-0.1], np.float32)).kl_k3)
