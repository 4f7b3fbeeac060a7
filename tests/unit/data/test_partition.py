"""Items are cut into parts of nearly equal cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.data.partition import balanced_parts


def sums(costs: np.ndarray, parts: list[np.ndarray]) -> list[float]:
    return [float(costs[part].sum()) for part in parts]


@given(st.lists(st.floats(0, 1e6), max_size=30), st.integers(1, 7))
def test_every_item_is_in_one_part(costs: list[float], num_parts: int) -> None:
    parts = balanced_parts(costs, num_parts)
    assert len(parts) == num_parts
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    assert all((np.diff(part) > 0).all() for part in parts)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_no_part_exceeds_another_by_more_than_the_dearest_item(costs: list[int], num_parts: int) -> None:
    totals = sums(np.array(costs, float), balanced_parts(costs, num_parts))
    assert max(totals) - min(totals) <= max(costs)


def test_the_classic_example() -> None:
    costs = np.array([8.0, 7.0, 6.0, 5.0, 4.0])
    assert sums(costs, balanced_parts(costs, 2)) == [16.0, 14.0]


@pytest.mark.parametrize("num_parts", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_64_skewed_sequences_are_even_to_a_twentieth(num_parts: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).lognormal(5, 0.8, 64).clip(16, 1024)
    costs = lengths * 1000 + lengths**2
    totals = sums(costs, balanced_parts(costs, num_parts))
    assert max(totals) / np.mean(totals) <= 1.05
