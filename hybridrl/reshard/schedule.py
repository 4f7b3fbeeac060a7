"""When a destination receives what: its pieces in the order of its local tensors, cut into chunks of bounded size.

Destinations that all begin at the first layer and the first expert all ask the same few sources at once, while the others wait.
When *staggered*, destination d of n begins at the module that d / n of its bytes lie before, and goes round; within each
module it begins at piece d / n and goes round. So pipeline stages and expert-parallel ranks serve all the time. The order is still
that of the layers, and no module is begun in one place and ended in another.

Destinations that pass pieces on to each other go in step, in one *lane*: they have one order of all that any of them wants, begin
at the same place, and chunk c of each ends at the same piece. So what one passes on is in the same chunk on both sides, and
nobody waits for a chunk that waits for his own (``executor.py``). A chunk ends when the next piece would be too much for any of them.

Worked example: modules a b c d of 10 bytes in two pieces each, chunks of 20 bytes, two destinations: the first receives
a1 a2 b1 b2, c1 c2 d1 d2, the second c2 c1 d2 d1, a2 a1 b2 b1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.reshard.boxes import IntArray
from hybridrl.reshard.geometry import Wanted, World
from hybridrl.reshard.plan import Chunk

_Lane = tuple[tuple[int, ...], float]


class Schedule:
    """Order and chunks of every destination's pieces, worked out when they are asked for.

    Args:
        is_shared: Whether the destinations of a node go in step.
    """

    def __init__(
        self, world: World, wanted: Wanted, chunk_bytes: int, *, is_staggered: bool, is_shared: bool = False
    ) -> None:
        self._rows = world.destinations.rows
        self._wanted = wanted
        self._chunk_bytes = chunk_bytes
        self._table_of = world.destinations.table_of
        nodes = [place.node for place in world.destinations.places]
        self._lane_of = _lanes(self._table_of, nodes if is_shared else range(len(nodes)), is_staggered=is_staggered)
        self._identities = wanted.identities(self._rows) if is_shared else None
        self._known: dict[_Lane, dict[int, _Course]] = {}
        self._named: dict[tuple[_Lane, int], tuple[Chunk, ...]] = {}

    def placed(self, destination: IntArray, piece: IntArray) -> tuple[IntArray, IntArray]:
        """Return the order in which pieces of destinations are received, destination by destination, and their chunks."""
        position, chunk = np.zeros_like(piece), np.zeros_like(piece)
        by_destination = np.argsort(destination, kind="stable")
        bounds = np.searchsorted(destination[by_destination], np.arange(len(self._table_of) + 1)).tolist()
        for index, (first, last) in enumerate(itertools.pairwise(bounds)):
            if last > first:
                rows, course = by_destination[first:last], self._course(index)
                position[rows], chunk[rows] = course.position[piece[rows]], course.chunk[piece[rows]]
        return np.lexsort((position, destination)), chunk

    def chunks(self, destination: int) -> tuple[Chunk, ...]:
        """Return the chunks of a destination with the names of its local tensors; one that is empty here is so named."""
        key = (self._lane_of[destination], self._table_of[destination])
        if key not in self._named:
            course = self._course(destination)
            order = np.argsort(course.position)
            local = self._local(self._table_of[destination])
            self._named[key] = _name_chunks(local[order], course.chunk[order], self._rows.local_names)
        return self._named[key]

    def _course(self, destination: int) -> _Course:
        lane = self._lane_of[destination]
        if lane not in self._known:
            self._known[lane] = self._courses(*lane)
        return self._known[lane][self._table_of[destination]]

    def _courses(self, tables: tuple[int, ...], fraction: float) -> dict[int, _Course]:
        """Order all that the maps of a lane want, and cut it."""
        pieces = [self._wanted.of_table(table) for table in tables]
        local = [self._local(table) for table in tables]
        if len(tables) == 1 or self._identities is None:
            slots, first = [np.arange(len(own)) for own in pieces], pieces[0]
        else:
            slots, first = _merge(local, [self._identities[own] for own in pieces], self._rows.local_names)
            first = np.concatenate(pieces)[first]
        order = _Order(self._rows.local[self._wanted.row[first]], self._wanted.num_bytes[first], self._rows.local_names)
        position = order.positions(fraction)
        sizes = np.zeros((len(tables), len(position)), dtype=np.int64)
        for row, slot, own in zip(sizes, slots, pieces, strict=True):
            row[position[slot]] = self._wanted.num_bytes[own]
        chunk = _fill(sizes, self._chunk_bytes)
        return {
            table: _Course(position[slot], chunk[position[slot]]) for table, slot in zip(tables, slots, strict=True)
        }

    def _local(self, table: int) -> IntArray:
        """Return the local tensor of each piece of a map."""
        local: IntArray = self._rows.local[self._wanted.row[self._wanted.of_table(table)]]
        return local


@dataclass(frozen=True, slots=True, eq=False)
class _Course:
    """Place in the order, and chunk, of each piece of one map."""

    position: IntArray
    chunk: IntArray


def _lanes(table_of: Sequence[int], groups: Iterable[object], *, is_staggered: bool) -> list[_Lane]:
    """Return the lane of each destination: the maps in its group, and where the group begins."""
    numbers: dict[object, int] = {}
    group_of = [numbers.setdefault(group, len(numbers)) for group in groups]
    tables: list[dict[int, None]] = [{} for _ in numbers]
    for table, group in zip(table_of, group_of, strict=True):
        tables[group][table] = None
    return [(tuple(tables[group]), group / len(numbers) if is_staggered else 0.0) for group in group_of]


def _merge(
    local: Sequence[IntArray], identities: Sequence[IntArray], names: Sequence[str]
) -> tuple[list[IntArray], IntArray]:
    """Put the distinct pieces of several maps in one order: by module, then local tensor, as the maps first name them.

    Within a local tensor the maps take turns, so that their chunks fill at the same time.

    Returns:
        For each map the place of its pieces in the order; and for each place a piece, numbered through all maps.
    """
    modules: dict[str, int] = {}
    tensors: dict[str, int] = {}
    all_local, identity = np.concatenate(local), np.concatenate(identities)
    used, inverse = np.unique(all_local, return_inverse=True)
    named = [names[index] for index in used.tolist()]
    module = [modules.setdefault(name.rpartition(".")[0], len(modules)) for name in named]
    tensor = [tensors.setdefault(name, len(tensors)) for name in named]
    within = np.concatenate([np.arange(len(own)) - own.searchsorted(own) for own in local])
    order = np.lexsort((within, np.array(tensor)[inverse], np.array(module)[inverse]))
    _, first, slot_of = np.unique(identity[order], return_index=True, return_inverse=True)
    place = np.empty_like(first)
    place[np.argsort(first)] = np.arange(len(first))
    slots = np.empty_like(order)
    slots[order] = place[slot_of]
    return np.split(slots, np.cumsum([len(own) for own in local])[:-1]), order[np.sort(first)]


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """Pieces in the order of their local tensors."""

    local: IntArray
    num_bytes: IntArray
    names: Sequence[str]

    def positions(self, fraction: float) -> IntArray:
        """Return the place of each piece in the order of a destination that begins at `fraction` of the way."""
        index = np.arange(len(self.local))
        if not fraction or not len(index):
            return index
        starts = self._module_starts()
        sizes = np.diff(starts, append=len(index))
        first, size = np.repeat(starts, sizes), np.repeat(sizes, sizes)
        within = (index - first - (fraction * size).astype(np.int64)) % size
        before = np.cumsum(self.num_bytes) - self.num_bytes
        late = starts[before[starts] >= fraction * self.num_bytes.sum()]
        begin = int(late[0]) if len(late) else 0
        positions: IntArray = (first + within - begin) % len(index)
        return positions

    def _module_starts(self) -> IntArray:
        """Return the pieces with which modules begin."""
        opens = np.flatnonzero(np.diff(self.local, prepend=-1))
        modules = [self.names[name].rpartition(".")[0] for name in self.local[opens].tolist()]
        is_new = [index == 0 or module != modules[index - 1] for index, module in enumerate(modules)]
        starts: IntArray = opens[np.array(is_new, dtype=bool)]
        return starts


def _fill(sizes: IntArray, chunk_bytes: int) -> IntArray:
    """Return the chunk of each piece: as many pieces in a row as fit for everyone, but at least one.

    Args:
        sizes: [num_maps, num_pieces] int64, bytes of each piece in each map.
    """
    num_pieces = sizes.shape[1]
    following = np.full(num_pieces, num_pieces)
    for own in sizes:
        ends = np.cumsum(own)
        following = np.minimum(following, ends.searchsorted(ends - own + chunk_bytes, side="right"))
    jumps = np.maximum(following, np.arange(num_pieces) + 1).tolist()
    opens = np.zeros(num_pieces, dtype=np.int64)
    first = 0
    while first < num_pieces:
        opens[first] = 1
        first = jumps[first]
    chunk: IntArray = np.cumsum(opens) - 1
    return chunk


def _name_chunks(local: IntArray, chunk: IntArray, names: Sequence[str]) -> tuple[Chunk, ...]:
    """Describe the chunks of pieces in the order in which they are received."""
    is_new = (np.diff(local, prepend=-1) != 0) | (np.diff(chunk, prepend=-1) != 0)
    local, chunk = local[is_new], chunk[is_new]
    last = np.zeros(len(names), dtype=np.int64)
    last[local] = chunk  # chunks ascend, and of several the last one stays
    is_last = (last[local] == chunk).tolist()
    named = list(map(names.__getitem__, local.tolist()))
    num_chunks = int(chunk[-1]) + 1 if len(chunk) else 0
    parts = itertools.pairwise(chunk.searchsorted(np.arange(num_chunks + 1)).tolist())
    return tuple(
        Chunk(
            index,
            tuple(dict.fromkeys(named[first:end])),
            tuple(dict.fromkeys(itertools.compress(named[first:end], is_last[first:end]))),
        )
        for index, (first, end) in enumerate(parts)
    )
