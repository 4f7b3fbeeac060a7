"""Rows become micro-batches of one shape, and their values find their way back."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.data.batch import SequenceBatch
from hybridrl.engines.megatron.micro_batches import scatter_back, split
from hybridrl.errors import EngineError

ALONE = SimpleNamespace(sizes=SimpleNamespace(world_size=1), device=torch.device("cpu"))


def make(lengths: list[int], width: int, seed: int = 0) -> tuple[SequenceBatch, np.ndarray]:
    rng = np.random.default_rng(seed)
    real = np.arange(width) < np.array(lengths, dtype=np.int32).reshape(-1, 1)
    batch = SequenceBatch((rng.integers(1, 50, real.shape) * real).astype(np.int32), np.array(lengths, np.int32))
    return batch, real & (np.arange(width) > 0) & (rng.random(real.shape) < 0.7)


@settings(deadline=None)  # the first call imports
@given(
    st.lists(st.integers(0, 9), max_size=9), st.integers(0, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 99)
)
def test_every_picked_token_appears_once_with_its_predecessor_and_value(lengths, slack, max_rows, multiple, seed):
    width = max([*lengths, 1]) + slack
    batch, picked = make(lengths, width, seed)
    values = np.arange(picked.size, dtype=np.float32).reshape(picked.shape)
    out = split(batch, picked, {"index": values}, ALONE, max_rows, multiple)
    assert {tuple(b.token_ids.shape) for b in out.batches} == {(out.rows, out.width)}
    assert out.rows <= max_rows and out.width % multiple == 0 and out.width < max([*lengths, 1]) + multiple
    assert len(out.batches) * out.rows < len(lengths) + len(out.batches) or len(lengths) == 0
    np.testing.assert_array_equal(scatter_back(picked, [b.values["index"] for b in out.batches]), values * picked)
    np.testing.assert_array_equal(scatter_back(picked, [b.targets for b in out.batches]), batch.token_ids * picked)
    before = np.zeros_like(batch.token_ids)
    before[:, 1:] = batch.token_ids[:, :-1]
    found = [b.token_ids.reshape(-1)[b.predicting] for b in out.batches]
    np.testing.assert_array_equal(scatter_back(picked, found), before * picked)


def test_rows_are_spread_evenly_over_the_fewest_micro_batches():
    batch, picked = make([5] * 9, 8)
    out = split(batch, picked, {}, ALONE, 4, 2)
    assert (len(out.batches), out.rows, out.width) == (3, 3, 6)


def test_nothing_still_makes_one_micro_batch():
    batch, picked = make([], 4)
    out = split(batch, picked, {}, ALONE, 4, 2)
    assert (len(out.batches), out.rows, out.width) == (1, 1, 2)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (0, r"token 0 of row 1 \(length 3\), which is the first of its row, which nothing predicts"),
        (3, r"token 3 of row 1 \(length 3\), which lies beyond its row's length"),
    ],
)
def test_a_token_that_cannot_be_trained_on_is_named(token, message):
    batch, picked = make([4, 3], 4)
    picked[1, token] = True
    with pytest.raises(EngineError, match=message):
        split(batch, picked, {}, ALONE, 2, 1)
