"""Streams: the position is the whole state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridrl.data.stream import MIX_BLOCK, Mixed, Sharded, Shuffle, Source, Stream, StreamState, apportion
from hybridrl.errors import DataError

ITEMS = tuple("abcdefghij")
# Times say nothing on a busy machine.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)


class Shuffled:
    """Items in a new order each epoch."""

    def __init__(self, seed: int, items: Sequence[str] = ITEMS) -> None:
        self._items = items
        self._shuffle = Shuffle(len(items), seed)
        self.seed = seed
        self.num_items = len(items)

    def at(self, position: int) -> str:
        return self._items[self._shuffle.at(position)[1]]


def mixed(seed: int) -> Source[str]:
    return Mixed([Shuffled(seed), Shuffled(seed, "ABC"), Shuffled(seed, "0")], [3, 1, 0.01], seed)


def stream(seed: int = 1, position: int = 0) -> Stream[str]:
    return Stream(Shuffled(seed), StreamState(position, position // len(ITEMS), seed))


@BUSY
@pytest.mark.parametrize("source", [Shuffled, mixed, lambda seed: Sharded(mixed(seed), 1, 3)])
@given(st.integers(0, 2**32), st.lists(st.integers(0, 700), max_size=4), st.integers(0, 700))
def test_a_resumed_stream_continues_as_an_uninterrupted_one(
    source: Callable[[int], Source[str]], seed: int, takes: list[int], rest: int
) -> None:
    whole = Stream(source(seed)).take(sum(takes) + rest)
    first = Stream(source(seed))
    taken = [item for count in takes for item in first.take(count)]
    saved = json.loads(json.dumps(asdict(first.state)))
    assert taken + Stream(source(seed), StreamState(**saved)).take(rest) == whole


@BUSY
@given(st.integers(0, 2**32), st.integers(1, 7), st.integers(1, 400))
def test_shards_are_disjoint_and_together_the_whole(seed: int, num_shards: int, count: int) -> None:
    shards = [Stream(Sharded(mixed(seed), rank, num_shards)).take(count) for rank in range(num_shards)]
    assert [item for row in zip(*shards, strict=True) for item in row] == Stream(mixed(seed)).take(count * num_shards)


@BUSY
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_a_mixture_keeps_its_proportions_and_the_order_of_each_source(seed: int, blocks: int) -> None:
    taken = Stream(mixed(seed)).take(blocks * MIX_BLOCK)
    counts = Mixed([Shuffled(seed)] * 3, [3, 1, 0.01], seed).counts
    assert counts == [748, 249, 3]
    for items, count in ((ITEMS, 748), ("ABC", 249), ("0", 3)):
        of_source = [item for item in taken if item in items]
        assert of_source == Stream(Shuffled(seed, items)).take(blocks * count)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), st.integers(0, 2000))
def test_apportioned_parts_add_up_and_are_within_one_of_exact(weights: list[float], total: int) -> None:
    parts = apportion(weights, total)
    assert sum(parts) == total
    assert all(
        abs(part - weight / sum(weights) * total) < 1 + 1e-6 for part, weight in zip(parts, weights, strict=True)
    )


@pytest.mark.parametrize("state", [StreamState(12, 1, 2), StreamState(12, 0, 1)])
def test_a_state_of_another_seed_or_other_data_is_refused(state: StreamState) -> None:
    with pytest.raises(DataError, match="resume with the seed and the files of the saved run"):
        Stream(Shuffled(1), state)


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_each_epoch_has_every_item_once(seed: int, epochs: int) -> None:
    taken = stream(seed).take(epochs * len(ITEMS))
    for epoch in range(epochs):
        assert Counter(taken[epoch * len(ITEMS) : (epoch + 1) * len(ITEMS)]) == Counter(ITEMS)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = stream(1).take(20)
    assert first[:10] != first[10:]
    assert first != stream(2).take(20)


def test_the_epoch_counts_whole_passes() -> None:
    s = stream(position=9)
    assert s.epoch == 0
    s.take(1)
    assert (s.epoch, s.state) == (1, StreamState(10, 1, 1))
