"""Endless, deterministic streams: the item at a position depends on the seed and the position alone.

So the position is the whole state: a run that resumes at position n sees what an uninterrupted run sees from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """Items by position."""

    @property
    def num_items(self) -> int | None:
        """Items in one epoch; None when they are generated without end."""
        ...

    def at(self, position: int) -> T_co:
        """Return the item at a position, counted from 0 over all epochs."""
        ...


@dataclass(frozen=True, slots=True)
class StreamState:
    """Where a stream stands.

    Attributes:
        position: Items taken so far, over all epochs.
    """

    position: int = 0


class Stream(Generic[T]):
    """Takes items of a source one after the other."""

    def __init__(self, source: Source[T], state: StreamState | None = None) -> None:
        self._source = source
        self._position = 0 if state is None else state.position

    @property
    def state(self) -> StreamState:
        """Where the stream stands."""
        return StreamState(self._position)

    @property
    def epoch(self) -> int:
        """Whole passes over the data so far; 0 for generated items."""
        return self._position // self._source.num_items if self._source.num_items else 0

    @property
    def first(self) -> T:
        """The item at position 0, wherever the stream stands."""
        return self._source.at(0)

    def take(self, count: int) -> list[T]:
        """Return the next `count` items."""
        items = [self._source.at(position) for position in range(self._position, self._position + count)]
        self._position += count
        return items


class Shuffle:
    """A different order of ``num_items`` in each epoch."""

    def __init__(self, num_items: int, seed: int) -> None:
        assert num_items > 0, num_items
        self._num_items = num_items
        self._seed = seed
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def at(self, position: int) -> tuple[int, int]:
        """Return the epoch and the item's index at a position."""
        epoch, offset = divmod(position, self._num_items)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._num_items)
        return epoch, int(self._order[offset])


class ShuffledSource(Generic[T]):
    """A finite sequence in a new order each epoch; see :class:`Source`."""

    def __init__(self, items: Sequence[T], seed: int) -> None:
        self._items = items
        self._shuffle = Shuffle(len(items), seed)

    @property
    def num_items(self) -> int:
        """Items in one epoch."""
        return len(self._items)

    def at(self, position: int) -> T:
        """Return the item at a position."""
        return self._items[self._shuffle.at(position)[1]]
