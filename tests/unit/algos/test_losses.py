"""Every policy loss, its gradient and its clip count against scalar float64 references with gradients by hand."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algos.loss.value import value_loss
from hybridrl.algos.policy_loss import PolicyLossConfig, PolicyTokens, TokenLoss, make_policy_loss
from hybridrl.config.choices import PolicyLossKind
from tests.unit.algos.ragged import random_cases

Kind = PolicyLossKind
LOW, HIGH, DUAL, POSITIVE, NEGATIVE = 0.2, 0.28, 1.5, 0.7, 1.3
PER_TOKEN = [Kind.CLIP, Kind.DUAL_CLIP, Kind.CISPO, Kind.SAPO]


def _config(kind: Kind) -> PolicyLossConfig:
    return PolicyLossConfig(
        kind=kind,
        clip_low=LOW,
        clip_high=HIGH,
        dual_clip=DUAL,
        positive_temperature=POSITIVE,
        negative_temperature=NEGATIVE,
    )


def _tokens(seed: int, num_tokens: int, num_segments: int) -> PolicyTokens:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    logprobs = (normal() - 2).requires_grad_()
    segments = torch.randint(0, num_segments, (num_tokens,), generator=generator)
    advantages = torch.where(torch.rand(num_tokens, generator=generator) < 0.1, 0.0, normal())
    return PolicyTokens(logprobs, logprobs.detach() + 0.4 * normal(), advantages, segments)


TOKENS = st.builds(_tokens, st.integers(0, 2**32 - 1), st.integers(0, 25), st.integers(1, 5))


def _clip_branch(ratio: float, advantage: float) -> tuple[float, bool]:
    """Return the loss and whether it is flat in the ratio."""
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    if ratio * advantage <= bounded * advantage:
        return -ratio * advantage, False
    return -bounded * advantage, True


def _token_reference(kind: Kind, logprob: float, old: float, advantage: float) -> tuple[float, float, bool]:
    """Return loss, derivative with respect to the log-prob, and whether the token is clipped."""
    ratio = math.exp(logprob - old)
    if kind is Kind.CISPO:
        weight = min(max(ratio, 1 - LOW), 1 + HIGH)
        return -weight * advantage * logprob, -weight * advantage, weight != ratio
    if kind is Kind.SAPO:
        tau = POSITIVE if advantage > 0 else NEGATIVE
        sigmoid = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -4 / tau * sigmoid * advantage, -4 * sigmoid * (1 - sigmoid) * ratio * advantage, False
    loss, is_flat = _clip_branch(ratio, advantage)
    if kind is Kind.DUAL_CLIP and advantage < 0 and loss > -DUAL * advantage:
        loss, is_flat = -DUAL * advantage, True
    return loss, 0.0 if is_flat else -ratio * advantage, is_flat


def _run(kind: Kind, tokens: PolicyTokens, weights: torch.Tensor) -> tuple[TokenLoss, torch.Tensor]:
    result = make_policy_loss(_config(kind))(tokens, _config(kind))
    (gradient,) = torch.autograd.grad((weights * result.loss).sum(), tokens.logprobs)
    return result, gradient


def _close(got: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", PER_TOKEN)
@random_cases
@given(tokens=TOKENS)
def test_losses_per_token_equal_the_reference(kind: Kind, tokens: PolicyTokens) -> None:
    weights = torch.linspace(0.1, 1, len(tokens.logprobs), dtype=torch.float64)
    result, gradient = _run(kind, tokens, weights)
    columns = (tokens.logprobs, tokens.old_logprobs, tokens.advantages)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    expected = [_token_reference(kind, *row) for row in rows]
    _close(result.loss, [loss for loss, _, _ in expected])
    _close(gradient, [w * slope for w, (_, slope, _) in zip(weights.tolist(), expected, strict=True)])
    assert result.is_clipped.tolist() == [clipped for _, _, clipped in expected]


def _sequence_reference(
    kind: Kind, tokens: PolicyTokens, weights: list[float]
) -> tuple[list[float], list[float], list[bool]]:
    """Losses, gradient of their weighted sum, and clips of GSPO and GMPO, sequence by sequence."""
    ratios = [p - o for p, o in zip(tokens.logprobs.tolist(), tokens.old_logprobs.tolist(), strict=True)]
    advantages, sequences = tokens.advantages.tolist(), defaultdict(list)
    for index, segment in enumerate(tokens.segments.tolist()):
        sequences[segment].append(index)
    losses, slopes, clips = [0.0] * len(ratios), [0.0] * len(ratios), [False] * len(ratios)
    for members in sequences.values():
        terms = {i: ratios[i] for i in members}
        if kind is Kind.GMPO:
            for i in members:
                if advantages[i] > 0 and ratios[i] > math.log(1 + HIGH):
                    terms[i], clips[i] = math.log(1 + HIGH), True
                elif advantages[i] < 0 and ratios[i] < math.log(1 - LOW):
                    terms[i], clips[i] = math.log(1 - LOW), True
        ratio = math.exp(math.fsum(terms.values()) / len(members))
        slope_of_ratio = 0.0
        for i in members:
            losses[i] = -ratio * advantages[i]
            is_flat = False
            if kind is Kind.GSPO:
                losses[i], is_flat = _clip_branch(ratio, advantages[i])
                clips[i] = is_flat
            slope_of_ratio += 0.0 if is_flat else -weights[i] * advantages[i]
        for i in members:
            moves = not (kind is Kind.GMPO and clips[i])
            slopes[i] = slope_of_ratio * ratio / len(members) if moves else 0.0
    return losses, slopes, clips


@pytest.mark.parametrize("kind", [Kind.GSPO, Kind.GMPO])
@random_cases
@given(tokens=TOKENS)
def test_losses_over_sequences_equal_the_reference(kind: Kind, tokens: PolicyTokens) -> None:
    weights = torch.linspace(0.1, 1, len(tokens.logprobs), dtype=torch.float64)
    result, gradient = _run(kind, tokens, weights)
    losses, slopes, clips = _sequence_reference(kind, tokens, weights.tolist())
    _close(result.loss, losses)
    _close(gradient, slopes)
    assert result.is_clipped.tolist() == clips


@pytest.mark.parametrize("kind", Kind)
def test_the_first_update_has_the_plain_policy_gradient(kind: Kind) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.5, 0.5, -1.5, -1.5], dtype=torch.float64)
    tokens = PolicyTokens(logprobs, logprobs.detach().clone(), advantages, torch.tensor([0, 0, 1, 1]))
    result, gradient = _run(kind, tokens, torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(gradient, -advantages)
    assert not result.is_clipped.any()


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("gap", [1e3, -1e3, math.inf, -math.inf])
def test_a_huge_log_ratio_stays_finite(kind: Kind, gap: float) -> None:
    tokens = PolicyTokens(
        torch.tensor([-1.0, -1.0], requires_grad=True),
        torch.tensor([-1.0 - gap, -1.0]),
        torch.tensor([-1.0, 1.0]),
        torch.tensor([0, 1]),
    )
    result, gradient = _run(kind, tokens, torch.ones(2))
    assert torch.isfinite(result.loss).all() and torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", Kind)
def test_a_log_prob_that_is_no_number_makes_the_loss_no_number_so_that_the_update_is_skipped(kind: Kind) -> None:
    tokens = PolicyTokens(
        torch.tensor([math.nan, -1.0], requires_grad=True), torch.zeros(2), torch.ones(2), torch.tensor([0, 1])
    )
    result, _ = _run(kind, tokens, torch.ones(2))
    assert result.loss.isnan().tolist() == [True, False]


@pytest.mark.parametrize("kind", Kind)
def test_no_token_at_all_has_an_empty_loss_with_an_empty_gradient(kind: Kind) -> None:
    result, gradient = _run(kind, _tokens(0, 0, 1), torch.zeros(0, dtype=torch.float64))
    assert result.loss.shape == gradient.shape == (0,)


@random_cases
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 0.05, 0.5]))
def test_the_value_loss_equals_the_reference(seed: int, clip_value: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = (torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    loss = value_loss(values, old, returns, clip_value)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    expected = []
    for value, before, target in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        plain = (value - target) ** 2 / 2
        moved = before + min(max(value - before, -(clip_value or 1e9)), clip_value or 1e9)
        clipped = (moved - target) ** 2 / 2
        is_flat = clip_value is not None and abs(value - before) > clip_value and clipped > plain
        expected.append((max(plain, clipped), 0.0 if is_flat else value - target))
    _close(loss.detach(), [row[0] for row in expected])
    _close(gradient, [row[1] for row in expected])


def test_worked_examples() -> None:
    def loss_of(kind: Kind, ratio: float, advantage: float, **settings: float) -> float:
        config = PolicyLossConfig(kind=kind, **settings)
        tokens = PolicyTokens(
            torch.tensor([math.log(ratio)], requires_grad=True),
            torch.zeros(1),
            torch.tensor([advantage]),
            torch.zeros(1),
        )
        return make_policy_loss(config)(tokens, config).loss.item()

    assert loss_of(Kind.CLIP, 1.5, 1.0) == pytest.approx(-1.28)
    assert loss_of(Kind.CLIP, 1.5, -1.0) == pytest.approx(1.5)
    assert loss_of(Kind.DUAL_CLIP, 4.0, -1.0) == pytest.approx(3.0)
    assert loss_of(Kind.SAPO, 1.0, 1.0) == pytest.approx(-2.0)
    assert loss_of(Kind.SAPO, 3.0, 1.0) == pytest.approx(-3.52, rel=1e-2)
    one, two = value_loss(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([2.0]), 0.2).item(), 0.845
    assert one == pytest.approx(two)
