"""Rows become packed micro-batches within a budget, and their values find their way back."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.data.batch import SequenceBatch
from hybridrl.engines.megatron import micro_batches
from hybridrl.engines.megatron.micro_batches import MicroBatch, PackingRules, scatter_back, split
from hybridrl.errors import EngineError
from hybridrl.layout.cost import SequenceCost

COST = SequenceCost(10.0, 1.0)


def groups(cp_size: int = 1, cp_rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        sizes=SimpleNamespace(dp=1, cp=cp_size), at=SimpleNamespace(cp=cp_rank), device=torch.device("cpu")
    )


def rules(max_tokens: int, *, is_packed: bool = True, multiples: tuple[int, int, int] = (1, 1, 1)) -> PackingRules:
    return PackingRules(max_tokens, is_packed, *multiples)


def make(lengths: list[int], width: int, seed: int = 0) -> tuple[SequenceBatch, np.ndarray]:
    rng = np.random.default_rng(seed)
    real = np.arange(width) < np.array(lengths, dtype=np.int32).reshape(-1, 1)
    batch = SequenceBatch((rng.integers(1, 50, real.shape) * real).astype(np.int32), np.array(lengths, np.int32))
    return batch, real & (np.arange(width) > 0) & (rng.random(real.shape) < 0.7)


def tokens_of(batch: MicroBatch) -> int:
    return batch.token_ids.numel()


def test_rows_that_no_two_fit_a_budget_are_packed_at_once(monkeypatch):
    """Searching for a number of parts that fits, one by one, would take as many partitions as there are rows."""
    calls = []
    count = micro_batches.balanced_parts
    monkeypatch.setattr(micro_batches, "balanced_parts", lambda *args: calls.append(args) or count(*args))
    batch, picked = make([9] * 40 + [7] * 40 + [3] * 20, 9)
    packed = split(batch, picked, {}, groups(), rules(12), COST)
    assert len(calls) <= 2
    assert max(map(tokens_of, packed)) <= 12 and sum(map(tokens_of, packed)) == 700
    assert len(packed) == 80  # no two of the 80 wide rows fit, and the narrow ones fit beside them


@settings(deadline=None)  # the first call imports
@given(
    lengths=st.lists(st.integers(0, 9), max_size=9),
    slack=st.integers(0, 4),
    budget=st.integers(16, 40),
    tp=st.integers(1, 4),
    cp=st.sampled_from([1, 2]),
    is_packed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_picked_token_is_on_one_cp_rank_with_its_predecessor_and_value(
    lengths, slack, budget, tp, cp, is_packed, seed
):
    width = max([*lengths, 1]) + slack
    batch, picked = make(lengths, width, seed)
    values = {"index": np.arange(picked.size, dtype=np.float32).reshape(picked.shape)}
    multiple = 2 * cp if cp > 1 else 1
    allowed = rules(budget, is_packed=is_packed, multiples=(multiple, int(np.lcm(multiple, cp * tp)), 1))
    found = {"values": np.zeros(picked.shape, np.float32), "before": np.zeros(picked.shape, np.float32)}
    times = np.zeros(picked.shape)
    for cp_rank in range(cp):
        alone = groups(cp, cp_rank)
        out = split(batch, picked, values, alone, allowed, COST)
        alone.sizes.cp = 1  # scatter_back then adds nothing up over ranks
        assert all(tokens_of(b) * cp <= budget + allowed.total_multiple for b in out)
        assert all(tokens_of(b) % tp == 0 for b in out)
        found["values"] += scatter_back(picked, out, [b.values["index"] for b in out], alone)
        found["before"] += scatter_back(picked, out, [b.token_ids[0][b.predicting] for b in out], alone)
        times += scatter_back(picked, out, [torch.ones(len(b.picks)) for b in out], alone)
    before = np.zeros_like(batch.token_ids)
    before[:, 1:] = batch.token_ids[:, :-1]
    np.testing.assert_array_equal(times, picked)
    np.testing.assert_array_equal(found["values"], values["index"] * picked)
    np.testing.assert_array_equal(found["before"], before * picked)


def test_packing_takes_no_tokens_but_the_real_ones_and_the_alignment():
    batch, picked = make([5, 4, 3, 3], 8)
    out = split(batch, picked, {}, groups(), rules(8, multiples=(1, 2, 1)), COST)
    assert sorted(tokens_of(b) for b in out) == [8, 8]
    assert [b.packed.lengths for b in out] == [(4, 4), (5, 3)]


def test_padded_rows_are_as_long_as_the_longest():
    batch, picked = make([5, 4, 3, 3], 8)
    out = split(batch, picked, {}, groups(), rules(10, is_packed=False), COST)
    assert [b.packed.lengths for b in out] == [(5, 5), (5, 5)]


def test_positions_restart_with_each_sequence():
    batch, picked = make([3, 2], 4)
    (out,) = split(batch, picked, {}, groups(), rules(8), COST)
    assert out.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert out.packed.cu_seqlens_q.tolist() == [0, 3, 5]


def test_micro_batches_run_from_cheap_over_dear_to_cheap():
    batch, picked = make([9, 7, 5, 3], 9)
    out = split(batch, picked, {}, groups(), rules(9), COST)
    assert [tokens_of(b) for b in out] in ([8, 9, 7], [7, 9, 8], [3, 7, 9, 5], [7, 9, 8])


def test_the_interleaved_schedule_gets_a_multiple_of_pp_micro_batches():
    batch, picked = make([4] * 5, 4)
    assert len(split(batch, picked, {}, groups(), rules(8, multiples=(1, 1, 2)), COST)) == 4


def test_nothing_still_makes_one_micro_batch():
    batch, picked = make([], 4)
    (out,) = split(batch, picked, {}, groups(), rules(8, multiples=(1, 2, 1)), COST)
    assert (tokens_of(out), len(out.picks)) == (2, 0)


def test_a_row_longer_than_a_micro_batch_is_refused():
    batch, picked = make([3, 9], 10)
    message = "row 1 has 9 tokens and takes up 9, but micro_batch_tokens is 8"
    with pytest.raises(EngineError, match=message):
        split(batch, picked, {}, groups(), rules(8), COST)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (0, r"token 0 of row 1 \(length 3\), which is the first of its row, which nothing predicts"),
        (3, r"token 3 of row 1 \(length 3\), which lies beyond its row's length"),
    ],
)
def test_a_token_that_nothing_predicts_is_refused(token, message):
    batch, picked = make([5, 3], 6)
    picked[:] = False
    picked[1, token] = True
    with pytest.raises(EngineError, match=message):
        split(batch, picked, {}, groups(), rules(8), COST)
