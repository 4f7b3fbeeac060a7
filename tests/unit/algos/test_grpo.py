"""Group-normalised advantages against a reference in plain Python floats."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algos.advantages import AdvantageEstimator, estimate_advantages
from hybridrl.algos.grpo import group_advantages


def _reference(rewards: list[float], groups: list[int], epsilon: float) -> list[float]:
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(members) == 1:
            out.append(0.0)
            continue
        out.append((reward - statistics.mean(members)) / (statistics.stdev(members) + epsilon))
    return out


@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 3)), min_size=1, max_size=40))
def test_advantages_equal_the_reference_for_ragged_interleaved_groups(rows: list[tuple[int, int]]) -> None:
    rewards = [reward / 4 for reward, _ in rows]
    groups = [group for _, group in rows]
    got = group_advantages(np.array(rewards), np.array(groups), 1e-4)
    # float32 result of a float64 computation: half a unit in the last place of values up to ~6.
    np.testing.assert_allclose(got.values, _reference(rewards, groups, 1e-4), rtol=1e-6, atol=1e-6)
    assert got.num_groups == len(set(groups))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_give_exactly_zero_and_are_counted(reward: float) -> None:
    got = group_advantages(np.array([reward] * 7 + [0.0, 1.0]), np.array([4] * 7 + [9, 9]), 1e-4)
    assert (got.values[:7] == 0).all()
    assert (got.num_groups, got.num_zero_groups) == (2, 1)


def test_a_group_of_one_sample_gives_exactly_zero() -> None:
    got = group_advantages(np.array([3.5]), np.array([0]), 0.0)
    assert got.values.tolist() == [0.0]
    assert got.num_zero_groups == 1


def test_the_estimator_enum_reaches_grpo() -> None:
    rewards, groups = np.array([1.0, 0.0, 0.0, 1.0]), np.array([0, 0, 0, 0])
    got = estimate_advantages(AdvantageEstimator.GRPO, rewards, groups, 0.0)
    np.testing.assert_allclose(got.values, [0.8660254, -0.8660254, -0.8660254, 0.8660254], rtol=1e-6)
