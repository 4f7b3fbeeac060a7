"""GAE against the definition as a double sum, over the trained tokens of each sample alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algos.advantage.gae import gae
from hybridrl.algos.advantage.inputs import AdvantageInputs, AdvantagesAndReturns
from hybridrl.config.algorithm import AdvantageConfig
from tests.unit.algos.ragged import Ragged, one_turn, ragged, random_cases


def _gae(inputs: AdvantageInputs, values: np.ndarray, **settings: object) -> AdvantagesAndReturns:
    return gae(replace(inputs, values=values), AdvantageConfig(**{"whiten": False} | settings))


def _reference(batch: Ragged, discount: float, trace_decay: float) -> tuple[np.ndarray, np.ndarray]:
    advantages, returns = np.zeros(batch.mask.shape), np.zeros(batch.mask.shape)
    for row, mask in enumerate(batch.mask):
        tokens = [t for t in range(len(mask)) if mask[t]]
        values = [float(batch.values[row, t]) for t in tokens] + [0.0]
        rewards = [-float(batch.inputs.kl_penalties[row, t]) for t in tokens]
        if tokens:
            rewards[-1] += float(batch.inputs.rewards[row])
        deltas = [rewards[k] + discount * values[k + 1] - values[k] for k in range(len(tokens))]
        for k, token in enumerate(tokens):
            advantages[row, token] = sum((discount * trace_decay) ** (j - k) * deltas[j] for j in range(k, len(tokens)))
            returns[row, token] = advantages[row, token] + values[k]
    return advantages, returns


@random_cases
@given(ragged(), st.sampled_from([0.5, 0.99, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_advantages_and_returns_equal_the_reference(batch: Ragged, discount: float, trace_decay: float) -> None:
    got = _gae(batch.inputs, batch.values, discount=discount, trace_decay=trace_decay)
    advantages, returns = _reference(batch, discount, trace_decay)
    np.testing.assert_allclose(got.advantages, advantages, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(got.returns, returns, rtol=1e-10, atol=1e-10)


@random_cases
@given(ragged())
def test_tokens_between_turns_change_nothing(batch: Ragged) -> None:
    at = batch.mask.shape[1] // 2
    mask, penalties = (np.insert(a, at, 0, axis=1) for a in (batch.mask, batch.inputs.kl_penalties))
    inputs = AdvantageInputs(batch.inputs.rewards, batch.inputs.group_ids, mask, penalties)
    wide = _gae(inputs, np.insert(batch.values, at, 1e6, axis=1), discount=0.9, trace_decay=0.8)
    plain = _gae(batch.inputs, batch.values, discount=0.9, trace_decay=0.8)
    np.testing.assert_array_equal(np.delete(wide.advantages, at, axis=1), plain.advantages)
    np.testing.assert_array_equal(np.delete(wide.returns, at, axis=1), plain.returns)


@random_cases
@given(ragged())
def test_with_trace_decay_1_and_no_discount_the_return_is_what_is_still_to_come(batch: Ragged) -> None:
    got = _gae(batch.inputs, batch.values, discount=1.0, trace_decay=1.0)
    to_come = np.cumsum(batch.inputs.kl_penalties[:, ::-1], axis=1)[:, ::-1]
    expected = np.where(batch.mask, batch.inputs.rewards[:, None] - to_come, 0.0)
    np.testing.assert_allclose(got.returns, expected, rtol=1e-9, atol=1e-9)


@random_cases
@given(ragged())
def test_whitening_is_over_trained_tokens_and_leaves_returns_alone(batch: Ragged) -> None:
    plain = _gae(batch.inputs, batch.values, discount=1.0, trace_decay=0.9)
    white = _gae(batch.inputs, batch.values, discount=1.0, trace_decay=0.9, whiten=True, epsilon=0.0)
    np.testing.assert_array_equal(white.returns, plain.returns)
    assert (white.advantages[~batch.mask] == 0).all()
    trained, before = white.advantages[batch.mask], plain.advantages[batch.mask]
    if trained.size > 1:
        assert trained.mean() == pytest.approx(0, abs=1e-9) and trained.std() == pytest.approx(1)
        np.testing.assert_allclose(trained * before.std() + before.mean(), before, rtol=1e-9, atol=1e-9)
    else:
        assert (trained == 0).all()


def test_the_worked_example() -> None:
    got = _gae(one_turn([1.0], [0], [2]), np.array([[0.5, 0.25]]), discount=1.0, trace_decay=0.5)
    assert got.advantages.tolist() == [[0.125, 0.75]] and got.returns.tolist() == [[0.625, 1.0]]
