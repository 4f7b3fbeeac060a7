"""Endless, deterministic streams: the item at a position depends on the seed and the position alone.

So the position is the whole state: a run that resumes at position n sees what an uninterrupted run sees from there on.

    Shuffled    a sequence in a new order each epoch
    Mixed       several sources in fixed proportions
    Sharded     every n-th item of a source
    Mapped      a function of each item
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridrl.errors import DataError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
Order = Callable[[int], NDArray[np.int64]]
MIX_BLOCK = 1000


class Source(Protocol[T_co]):
    """Items by position."""

    @property
    def num_items(self) -> int | None:
        """Items in one epoch; None when there are no epochs."""
        ...

    @property
    def seed(self) -> int:
        """What the order depends on besides the position."""
        ...

    def at(self, position: int) -> T_co:
        """Return the item at a position, counted from 0 over all epochs."""
        ...


@dataclass(frozen=True, slots=True)
class StreamState:
    """Where a stream stands.

    Attributes:
        position: Items taken so far, over all epochs.
        epoch: Whole passes over the data so far; 0 where there are no epochs.
        seed: Seed of the stream.
    """

    position: int
    epoch: int
    seed: int


class Stream(Generic[T]):
    """Takes items of a source one after the other.

    Raises:
        DataError: When `state` is of a stream with another seed or of data of another size: its position would mean
            other items.
    """

    def __init__(self, source: Source[T], state: StreamState | None = None) -> None:
        self._source = source
        self._position = 0
        if state is not None:
            self.restore(state)

    def restore(self, state: StreamState) -> None:
        """Go on from a state.

        Raises:
            DataError: It is of a stream with another seed or of data of another size.
        """
        self._position = state.position
        if state != self.state:
            raise DataError(
                f"data: the stream was saved as {state}, but with this seed and these files it would be {self.state}; "
                "resume with the seed and the files of the saved run"
            )

    @property
    def state(self) -> StreamState:
        """Where the stream stands."""
        return StreamState(self._position, self.epoch, self._source.seed)

    @property
    def epoch(self) -> int:
        """Whole passes over the data so far; 0 where there are no epochs."""
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
    """A different order of ``num_items`` in each epoch.

    Args:
        order: Order of an epoch, a permutation; None draws one from the seed.
    """

    def __init__(self, num_items: int, seed: int, order: Order | None = None) -> None:
        assert num_items > 0, num_items
        self._num_items = num_items
        self._seed = seed
        self._draw = order or self._random
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def at(self, position: int) -> tuple[int, int]:
        """Return the epoch and the item's index at a position."""
        epoch, offset = divmod(position, self._num_items)
        if epoch != self._epoch:
            self._order = self._draw(epoch)
            self._epoch = epoch
        return epoch, int(self._order[offset])

    def _random(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_items)


class Mixed(Generic[T]):
    """Several sources in the proportion of their weights; see :class:`Source`.

    Every block of 1000 items holds the same number of each source, in an order drawn from the seed, so that the place in
    each source follows from the position.

    Example: weights 3 and 1 put 750 and 250 into each block; item 1000 is the 750th of the first source or the 250th of
    the second, counted from 0.
    """

    num_items = None

    def __init__(self, sources: Sequence[Source[T]], weights: Sequence[float], seed: int) -> None:
        self._sources = sources
        self.seed = seed
        self.counts = apportion(weights, MIX_BLOCK)
        self._block = -1
        self._parts = np.repeat(np.arange(len(sources)), self.counts)
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._ranks = np.empty(MIX_BLOCK, dtype=np.int64)

    def at(self, position: int) -> T:
        """Return the item at a position."""
        block, offset = divmod(position, MIX_BLOCK)
        if block != self._block:
            self._order = np.random.default_rng([self.seed, block]).permutation(self._parts)
            for source, count in enumerate(self.counts):
                self._ranks[self._order == source] = np.arange(count)
            self._block = block
        source = int(self._order[offset])
        return self._sources[source].at(block * self.counts[source] + int(self._ranks[offset]))


class Sharded(Generic[T]):
    """Items rank, rank + num_shards, rank + 2 num_shards, ... of a source: disjoint between ranks, all of it together."""

    num_items = None

    def __init__(self, source: Source[T], rank: int, num_shards: int) -> None:
        assert 0 <= rank < num_shards, (rank, num_shards)
        self._source = source
        self._rank = rank
        self._num_shards = num_shards
        self.seed = source.seed

    def at(self, position: int) -> T:
        """Return the item at a position of this shard."""
        return self._source.at(position * self._num_shards + self._rank)


class Mapped(Generic[T, U]):
    """A function of each item of a source; see :class:`Source`."""

    def __init__(self, source: Source[T], function: Callable[[T], U]) -> None:
        self._source = source
        self._function = function
        self.seed = source.seed
        self.num_items = source.num_items

    def at(self, position: int) -> U:
        """Return the function of the item at a position."""
        return self._function(self._source.at(position))


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` into whole parts by weight, by largest remainders.

    Example: weights 1, 1, 1 and total 1000 give 334, 333, 333.
    """
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * total
    parts = np.floor(exact).astype(np.int64)
    largest = np.argsort(-(exact - parts), kind="stable")[: total - int(parts.sum())]
    parts[largest] += 1
    return [int(part) for part in parts]
