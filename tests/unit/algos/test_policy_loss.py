"""The policy loss, its gradient and its KL term against scalar float64 references."""

from __future__ import annotations

import math

import pytest
import torch

from hybridrl.algos.kl import k3
from hybridrl.algos.policy_loss import policy_token_loss

LOW, HIGH = 0.2, 0.28


def _reference(logprob: float, old: float, advantage: float) -> tuple[float, float]:
    """Return the loss of one token and its derivative with respect to the log-prob."""
    ratio = math.exp(logprob - old)
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    if ratio * advantage <= bounded * advantage:
        return -ratio * advantage, -ratio * advantage
    return -bounded * advantage, 0.0


def test_loss_and_gradient_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(5, 40, generator=generator, dtype=torch.float64).requires_grad_()
    old = logprobs.detach() + 0.5 * torch.randn(5, 40, generator=generator, dtype=torch.float64)
    advantages = torch.randn(5, 40, generator=generator, dtype=torch.float64)
    loss = policy_token_loss(logprobs, old, advantages, LOW, HIGH)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    rows = zip(logprobs.flatten().tolist(), old.flatten().tolist(), advantages.flatten().tolist(), strict=True)
    expected = [_reference(*row) for row in rows]
    torch.testing.assert_close(loss.flatten(), torch.tensor([e[0] for e in expected], dtype=torch.float64))
    torch.testing.assert_close(gradient.flatten(), torch.tensor([e[1] for e in expected], dtype=torch.float64))
    assert any(e[1] == 0.0 for e in expected)


def test_the_first_update_has_ratio_one_and_the_plain_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.5, -1.5, 0.0])
    loss = policy_token_loss(logprobs, logprobs.detach().clone(), advantages, LOW, HIGH)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert torch.equal(loss, -advantages)
    assert torch.equal(gradient, -advantages)


@pytest.mark.parametrize("gap", [1e3, -1e3])
def test_a_huge_log_ratio_stays_finite(gap: float) -> None:
    logprobs = torch.tensor([gap], requires_grad=True)
    loss = policy_token_loss(logprobs, torch.zeros(1), torch.tensor([-1.0]), LOW, HIGH)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()


def test_kl_equals_the_reference_and_is_zero_and_flat_where_the_two_agree() -> None:
    logprobs = torch.tensor([-0.3, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.9, -0.5, -1.0], dtype=torch.float64)
    kl = k3(logprobs, ref)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    deltas = [r - p for r, p in zip(ref.tolist(), logprobs.tolist(), strict=True)]
    torch.testing.assert_close(kl, torch.tensor([math.exp(d) - d - 1 for d in deltas], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([1 - math.exp(d) for d in deltas], dtype=torch.float64))
    assert kl[2] == 0 and gradient[2] == 0
