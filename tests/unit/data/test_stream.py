"""Streams: the position is the whole state."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hybridrl.data.stream import ShuffledSource, Stream, StreamState

ITEMS = tuple("abcdefghij")


def stream(seed: int = 1, position: int = 0) -> Stream[str]:
    return Stream(ShuffledSource(ITEMS, seed), StreamState(position))


@given(st.integers(0, 2**32), st.lists(st.integers(0, 7)), st.integers(0, 50))
def test_a_resumed_stream_continues_as_an_uninterrupted_one(seed: int, takes: list[int], rest: int) -> None:
    whole = stream(seed).take(sum(takes) + rest)
    first = stream(seed)
    taken = [item for count in takes for item in first.take(count)]
    resumed = Stream(ShuffledSource(ITEMS, seed), first.state)
    assert taken + resumed.take(rest) == whole


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
    assert (s.epoch, s.state) == (1, StreamState(10))
