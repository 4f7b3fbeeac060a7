"""KL estimators and their gradients, against arithmetic by hand and against the KL of a whole distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hybridrl.algos.kl import RewardKl, kl_per_token
from hybridrl.config.algorithm import RewardKlConfig
from hybridrl.config.choices import KlEstimator

LOGPROBS, REF = [-0.3, -2.0, -1.0], [-0.9, -0.5, -1.0]
VALUES = {
    KlEstimator.K1: lambda d: -d,
    KlEstimator.K2: lambda d: d * d / 2,
    KlEstimator.K3: lambda d: math.exp(d) - d - 1,
}
SLOPES = {KlEstimator.K1: lambda d: 1.0, KlEstimator.K2: lambda d: -d, KlEstimator.K3: lambda d: 1 - math.exp(d)}


@pytest.mark.parametrize("estimator", KlEstimator)
@pytest.mark.parametrize("unbiased", [False, True])
def test_values_and_gradients_equal_the_reference(estimator: KlEstimator, unbiased: bool) -> None:
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    kl = kl_per_token(estimator, logprobs, torch.tensor(REF, dtype=torch.float64), unbiased_gradient=unbiased)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    deltas = [r - p for r, p in zip(REF, LOGPROBS, strict=True)]
    slope = SLOPES[KlEstimator.K2 if unbiased else estimator]
    torch.testing.assert_close(kl, torch.tensor([VALUES[estimator](d) for d in deltas], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([slope(d) for d in deltas], dtype=torch.float64))


@pytest.mark.parametrize("estimator", KlEstimator)
def test_the_unbiased_gradient_is_in_expectation_that_of_the_kl(estimator: KlEstimator) -> None:
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    logprobs, ref = logits.log_softmax(0), torch.tensor([0.5, 0.2, -0.4, 1.0], dtype=torch.float64).log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    kl = kl_per_token(estimator, logprobs, ref, unbiased_gradient=True)
    (expected,) = torch.autograd.grad((logprobs.detach().exp() * kl).sum(), logits, retain_graph=True)
    torch.testing.assert_close(expected, exact)
    (own,) = torch.autograd.grad((logprobs.detach().exp() * kl_per_token(estimator, logprobs, ref)).sum(), logits)
    assert torch.allclose(own, exact) == (estimator is KlEstimator.K2)


def test_k1_and_k3_are_in_expectation_the_kl() -> None:
    logprobs = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64).log_softmax(0)
    ref = torch.tensor([0.5, 0.2, -0.4], dtype=torch.float64).log_softmax(0)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    for estimator in (KlEstimator.K1, KlEstimator.K3):
        torch.testing.assert_close((logprobs.exp() * kl_per_token(estimator, logprobs, ref)).sum(), exact)


@pytest.mark.parametrize("estimator", KlEstimator)
def test_a_huge_difference_stays_finite(estimator: KlEstimator) -> None:
    kl = kl_per_token(estimator, torch.tensor([-1e3, 0.0]), torch.tensor([0.0, -1e3]))
    assert torch.isfinite(kl).all()


def test_the_penalty_looks_at_trained_tokens_only() -> None:
    mask = np.array([[False, True, True]])
    old, ref = np.array([[np.nan, -1.0, -2.0]], np.float32), np.array([[1.0, -1.5, -1.0]], np.float32)
    assert RewardKl(RewardKlConfig(coef=0.1)).divergence(old, ref, mask).tolist() == [[0.0, 0.5, -1.0]]


def test_an_adaptive_weight_moves_towards_its_target_in_bounded_steps() -> None:
    kl = RewardKl(RewardKlConfig(coef=0.1, target=0.5, horizon_samples=1000))
    kl.adapt(0.55, num_samples=100)
    assert kl.coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    kl.adapt(50.0, num_samples=100)
    assert kl.coef == pytest.approx(0.1 * 1.01 * 1.02)
    kl.adapt(-3.0, num_samples=100)
    assert kl.coef == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)


def test_a_weight_without_a_target_stays() -> None:
    kl = RewardKl(RewardKlConfig(coef=0.1))
    kl.adapt(50.0, num_samples=100)
    assert kl.coef == 0.1
