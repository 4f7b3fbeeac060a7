"""When a destination receives what: its pieces in the order of its local tensors, cut into chunks of bounded size.

Destinations that all begin at the first layer and the first expert all ask the same few sources at once, while the others wait.
When *staggered*, destination d of n begins at the module that d / n of its bytes lie before, and goes round; within each
module it begins at piece d / n and goes round. So pipeline stages and expert-parallel ranks serve all the time. The order is still
that of the layers, and no module is begun in one place and ended in another.

Worked example: modules a b c d of 10 bytes in two pieces each, chunks of 20 bytes, two destinations: the first receives
a1 a2 b1 b2, c1 c2 d1 d2, the second c2 c1 d2 d1, a2 a1 b2 b1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from hybridrl.reshard.boxes import IntArray
from hybridrl.reshard.geometry import Wanted, World
from hybridrl.reshard.plan import Chunk


class Schedule:
    """Order and chunks of every destination's pieces, worked out when they are asked for."""

    def __init__(self, world: World, wanted: Wanted, chunk_bytes: int, *, is_staggered: bool) -> None:
        self._chunk_bytes = chunk_bytes
        rows, bounds, table_of = world.destinations.rows, wanted.bounds, world.destinations.table_of
        own = [slice(*bounds[table : table + 2]) for table in range(len(world.destinations.tables))]
        pieces = [_Pieces(rows.local[wanted.row[part]], wanted.num_bytes[part], rows.local_names) for part in own]
        fractions = [destination / len(table_of) if is_staggered else 0.0 for destination in range(len(table_of))]
        self._key = list(zip(table_of, fractions, strict=True))
        self._pieces = pieces
        self._positions: dict[tuple[int, float], IntArray] = {}
        self._filled: dict[tuple[int, float], IntArray] = {}
        self._named: dict[tuple[int, float], tuple[Chunk, ...]] = {}

    def placed(self, destination: IntArray, piece: IntArray) -> tuple[IntArray, IntArray]:
        """Return the order in which pieces of destinations are received, destination by destination, and their chunks."""
        position, chunk = np.zeros_like(piece), np.zeros_like(piece)
        by_destination = np.argsort(destination, kind="stable")
        bounds = np.searchsorted(destination[by_destination], np.arange(len(self._key) + 1)).tolist()
        for key, (first, last) in zip(self._key, itertools.pairwise(bounds), strict=True):
            if last > first:
                rows = by_destination[first:last]
                position[rows], chunk[rows] = self._position_of(key)[piece[rows]], self._chunk_of(key)[piece[rows]]
        return np.lexsort((position, destination)), chunk

    def chunks(self, destination: int) -> tuple[Chunk, ...]:
        """Return the chunks of a destination with the names of its local tensors."""
        key = self._key[destination]
        if key not in self._named:
            order = np.argsort(self._position_of(key))
            pieces, chunk = self._pieces[key[0]], self._chunk_of(key)
            self._named[key] = _name_chunks(pieces.local[order], chunk[order], pieces.names)
        return self._named[key]

    def _chunk_of(self, key: tuple[int, float]) -> IntArray:
        if key not in self._filled:
            position, sizes = self._position_of(key), self._pieces[key[0]].num_bytes
            in_order = np.empty_like(sizes)
            in_order[position] = sizes
            self._filled[key] = _fill(in_order, self._chunk_bytes)[position]
        return self._filled[key]

    def _position_of(self, key: tuple[int, float]) -> IntArray:
        if key not in self._positions:
            self._positions[key] = self._pieces[key[0]].positions(key[1])
        return self._positions[key]


class _Pieces:
    """The pieces of one map, in the order of its local tensors."""

    def __init__(self, local: IntArray, num_bytes: IntArray, names: Sequence[str]) -> None:
        self.local = local
        self.num_bytes = num_bytes
        self.names = names

    @cached_property
    def _module_starts(self) -> IntArray:
        """The pieces with which modules begin."""
        opens = np.flatnonzero(np.diff(self.local, prepend=-1))
        modules = [self.names[name].rpartition(".")[0] for name in self.local[opens].tolist()]
        is_new = [index == 0 or module != modules[index - 1] for index, module in enumerate(modules)]
        starts: IntArray = opens[np.array(is_new, dtype=bool)]
        return starts

    def positions(self, fraction: float) -> IntArray:
        """Return the place of each piece in the order of a destination that begins at `fraction` of the way."""
        index = np.arange(len(self.local))
        if not fraction:
            return index
        starts = self._module_starts
        sizes = np.diff(starts, append=len(index))
        first, size = np.repeat(starts, sizes), np.repeat(sizes, sizes)
        within = (index - first - (fraction * size).astype(np.int64)) % size
        before = np.cumsum(self.num_bytes) - self.num_bytes
        late = starts[before[starts] >= fraction * self.num_bytes.sum()]
        begin = int(late[0]) if len(late) else 0
        positions: IntArray = (first + within - begin) % len(index)
        return positions


def _fill(num_bytes: IntArray, chunk_bytes: int) -> IntArray:
    """Return the chunk of each piece: as many pieces in a row as fit, but at least one."""
    ends, index = np.cumsum(num_bytes), np.arange(len(num_bytes))
    following = np.maximum(ends.searchsorted(ends - num_bytes + chunk_bytes, side="right"), index + 1).tolist()
    opens = np.zeros(len(num_bytes), dtype=np.int64)
    first = 0
    while first < len(following):
        opens[first] = 1
        first = following[first]
    chunk: IntArray = np.cumsum(opens) - 1
    return chunk


def _name_chunks(local: IntArray, chunk: IntArray, names: Sequence[str]) -> tuple[Chunk, ...]:
    """Describe the chunks of pieces in the order in which they are received."""
    is_new = (np.diff(local, prepend=-1) != 0) | (np.diff(chunk, prepend=-1) != 0)
    visits = list(zip(local[is_new].tolist(), chunk[is_new].tolist(), strict=True))
    last = dict(visits)
    touched: list[dict[int, None]] = [{} for _ in range(visits[-1][1] + 1 if visits else 0)]
    for name, index in visits:
        touched[index][name] = None
    return tuple(
        Chunk(i, tuple(names[n] for n in own), tuple(names[n] for n in own if last[n] == i))
        for i, own in enumerate(touched)
    )
