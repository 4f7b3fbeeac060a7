"""What the sources of a plan hold and what its destinations want, as disjoint pieces, before anyone is chosen to serve them.

Everything here is computed once per distinct map: replicas have equal maps.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybridrl.errors import ReshardError
from hybridrl.layout.box import Box
from hybridrl.layout.shard import Place, ShardMap
from hybridrl.reshard.boxes import (
    Boxes,
    IntArray,
    disjoint_cells,
    distinct_boxes,
    first_missing,
    first_overlap,
    match,
    packed,
)
from hybridrl.reshard.table import DTYPES, ShardTable, itemsizes, shard_tables

Maps = Sequence[ShardMap | ShardTable]


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a plan.

    Attributes:
        places: Of every rank.
        tables: The distinct maps.
        numbers: For each of them, the number in the world of each of its canonical tensors.
        table_of: Rank -> index in `tables`.
    """

    places: tuple[Place, ...]
    tables: list[ShardTable]
    numbers: list[IntArray]
    table_of: list[int]

    @cached_property
    def rows(self) -> Rows:
        """The rows of all tables in one."""
        return Rows.of(self.tables, self.numbers)


@dataclass(frozen=True, eq=False)
class Rows:
    """Shards of several tables, one after the other.

    Attributes:
        first: [num_tables] int64, row at which each table starts.
        boxes: Canonical boxes.
        table: [num_rows] int64.
        local: [num_rows] int64, index into `local_names`.
        offset: [num_rows] int64; `strides` is [num_rows, num_dims].
        dtype: [num_rows] int64, element type code.
    """

    first: IntArray
    boxes: Boxes
    table: IntArray
    local: IntArray
    offset: IntArray
    strides: IntArray
    dtype: IntArray
    local_names: tuple[str, ...]

    @classmethod
    def of(cls, tables: Sequence[ShardTable], numbers: Sequence[IntArray]) -> Rows:
        """Stack tables; `numbers` are those of :class:`Side`."""
        sizes = [len(table.tensor) for table in tables]
        first_local = np.cumsum([0, *(len(table.locals) for table in tables)])
        local = np.concatenate([table.local + at for table, at in zip(tables, first_local[:-1], strict=True)])
        return cls(
            first=np.cumsum([0, *sizes])[:-1],
            boxes=Boxes(
                np.concatenate([own.take(table.tensor) for table, own in zip(tables, numbers, strict=True)]),
                np.concatenate([table.start for table in tables]),
                np.concatenate([table.stop for table in tables]),
            ),
            table=np.repeat(np.arange(len(sizes)), sizes),
            local=local,
            offset=np.concatenate([table.offset for table in tables]),
            strides=np.concatenate([table.strides for table in tables]),
            dtype=np.concatenate([table.dtype for table in tables]).take(local),
            local_names=tuple(itertools.chain.from_iterable(table.locals for table in tables)),
        )


@dataclass(frozen=True, eq=False)
class World:
    """Both sides, speaking of the same canonical tensors.

    Attributes:
        names: Of the canonical tensors, by number.
        shapes: [num_tensors, num_dims] int64.
        ndims: [num_tensors] int64.

    Raises:
        ReshardError: When a tensor has different shapes.
    """

    sources: Side
    destinations: Side
    names: tuple[str, ...]
    shapes: IntArray
    ndims: IntArray

    @classmethod
    def of(cls, sources: Maps, destinations: Maps) -> World:
        """Recognise equal maps and number the canonical tensors."""
        tables = shard_tables([*sources, *destinations])
        num_dims = max(table.num_dims for table in tables)
        sides = [tables[: len(sources)], tables[len(sources) :]]
        numbers = _Numbers()
        both = [_side(own, numbers, num_dims) for own in sides]
        names = numbers.names()
        return cls(both[0], both[1], names, *_shapes(both, len(names), num_dims))


class _Numbers:
    """Numbers canonical names as they come; maps with the same names share an array."""

    def __init__(self) -> None:
        self._of_name: dict[str, int] = defaultdict(itertools.count().__next__)
        self._of_names: dict[tuple[str, ...], IntArray] = {}

    def names(self) -> tuple[str, ...]:
        """Return all names, by number."""
        return tuple(self._of_name)

    def of(self, names: tuple[str, ...]) -> IntArray:
        """Return the number of each name."""
        known = self._of_names.get(names)  # one look-up: hashing thousands of names takes a while
        if known is None:
            known = np.fromiter(map(self._of_name.__getitem__, names), np.int64, len(names))
            self._of_names[names] = known
        return known


def _distinct(tables: Sequence[ShardTable]) -> list[ShardTable]:
    """Return the first of each group of equal maps."""
    first: dict[bytes, ShardTable] = {}
    for table in tables:
        first.setdefault(table.digest, table)
    return list(first.values())


def _side(tables: Sequence[ShardTable], numbers: _Numbers, num_dims: int) -> Side:
    kept = [table.widened(num_dims) for table in _distinct(tables)]
    position = {table.digest: index for index, table in enumerate(kept)}
    own = [numbers.of(table.names) for table in kept]
    return Side(tuple(table.place for table in tables), kept, own, [position[table.digest] for table in tables])


def _shapes(sides: Sequence[Side], num_tensors: int, num_dims: int) -> tuple[IntArray, IntArray]:
    """Return shape and number of dimensions by number, and prove that all maps agree on them."""
    both = [(table, own) for side in sides for table, own in zip(side.tables, side.numbers, strict=True)]
    shapes = np.zeros((num_tensors, num_dims), dtype=np.int64)
    ndims, first = np.zeros((2, num_tensors), dtype=np.int64)
    for index, (table, own) in reversed(list(enumerate(both))):
        shapes[own], ndims[own], first[own] = table.shapes, table.ndims, index
    for table, own in both:
        is_other = functools.reduce(
            np.logical_or, (shapes.take(own, axis=0) != table.shapes).T, ndims[own] != table.ndims
        )
        for row in np.flatnonzero(is_other)[:1]:
            place, number = both[first[own[row]]][0].place, own[row]
            expected, got = (
                tuple(shapes[number, : ndims[number]].tolist()),
                tuple(table.shapes[row, : table.ndims[row]].tolist()),
            )
            raise ReshardError(f"{table.names[row]}: shape {expected} at {place}, but {got} at {table.place}")
    return shapes, ndims


@dataclass(frozen=True, eq=False)
class Held:
    """Disjoint cells of all sources.

    Attributes:
        cells: Sorted by tensor.
        dtype: [num_cells] int64, element type code.
        holder_set: [num_cells] int64, index into `sets`.
        sets: Source maps that hold a cell, ascending.
        pair: [num_pairs] int64, ascending: cell * number of source maps + source map.
        row: [num_pairs] int64, the row of that map, in the sources' `rows`, whose box contains the cell.
    """

    cells: Boxes
    dtype: IntArray
    holder_set: IntArray
    sets: list[tuple[int, ...]]
    pair: IntArray
    row: IntArray

    @classmethod
    def of(cls, world: World) -> Held:
        """Cut the boxes of all source maps into cells.

        Raises:
            ReshardError: When two ranks hold a tensor in different element types.
        """
        sources, rows = world.sources, world.sources.rows
        cut = disjoint_cells(rows.boxes)
        owner, dtype = rows.table[cut.row], rows.dtype[cut.row]
        is_first = (np.diff(cut.cell, prepend=-1) != 0) | (np.diff(owner, prepend=-1) != 0)
        opens = np.flatnonzero(np.diff(cut.cell, prepend=-1))
        for pair in np.flatnonzero(dtype != dtype[opens][cut.cell])[:1]:
            tensor, other = int(cut.boxes.tensor[cut.cell[pair]]), opens[cut.cell[pair]]
            at = [f"{DTYPES[dtype[p]].value} at {sources.tables[owner[p]].place}" for p in (other, pair)]
            raise ReshardError(f"{world.names[tensor]}: {at[0]}, but {at[1]}; keep a tensor in one type on all sources")
        cell, owner = cut.cell[is_first], owner[is_first]
        holder_set, sets = _holder_sets(cell, owner)
        return cls(cut.boxes, dtype[opens], holder_set, sets, cell * len(sources.tables) + owner, cut.row[is_first])


def _holder_sets(cell: IntArray, owner: IntArray) -> tuple[IntArray, list[tuple[int, ...]]]:
    """Group cells by the exact set of maps that hold them; pairs are sorted by cell, then map."""
    first = np.flatnonzero(np.diff(cell, prepend=-1))
    counts = np.diff(first, append=len(cell))
    numbers = np.zeros(len(first), dtype=np.int64)
    sets: list[tuple[int, ...]] = []
    for count in np.unique(counts).tolist():
        alike = np.flatnonzero(counts == count)
        holders = owner[first[alike][:, None] + np.arange(count)]
        group = np.zeros(len(alike), dtype=np.int64)
        for column in packed(list(holders.T), below=1 << 31):
            group = np.unique(group * (int(column.max()) + 1) + column, return_inverse=True)[1]
        _, example = np.unique(group, return_index=True)
        numbers[alike] = group + len(sets)
        sets += map(tuple, holders[example].tolist())
    return numbers, sets


@dataclass(frozen=True, eq=False)
class Wanted:
    """What the destination maps want, map by map, cut by the cells, in the order of the local tensors.

    Attributes:
        row: [num_pieces] int64, in the destinations' `rows`.
        cell: [num_pieces] int64.
        boxes: Of the pieces; disjoint, and together the boxes of the map.
        num_bytes: [num_pieces] int64, in the narrower element type of the two sides.
        bounds: Pieces ``bounds[m] : bounds[m + 1]`` are those of map m.
    """

    row: IntArray
    cell: IntArray
    boxes: Boxes
    num_bytes: IntArray
    bounds: list[int]

    def of_table(self, table: int) -> IntArray:
        """Return the pieces of a map."""
        return np.arange(self.bounds[table], self.bounds[table + 1])

    def identities(self, rows: Rows) -> IntArray:
        """Return [num_pieces] int64, equal where different maps want the same box in the same element type.

        Args:
            rows: Of the destinations.
        """
        distinct = distinct_boxes(self.boxes)
        identity = np.empty_like(self.cell)
        identity[distinct.row] = distinct.cell
        return identity * len(DTYPES) + rows.dtype[self.row]

    @classmethod
    def of(cls, world: World, held: Held, chunk_bytes: int) -> Wanted:
        """Cut the boxes of every destination map, into pieces of at most `chunk_bytes` where that is possible.

        Raises:
            ReshardError: When an element has two homes in a map, or none among the sources.
        """
        rows = world.destinations.rows
        order = np.argsort(rows.local, kind="stable")  # by map, then by local tensor
        boxes = rows.boxes[order]
        _check_unique(world, order)
        cell, at = match(held.cells.tensor, boxes.tensor)
        pieces = held.cells[cell].intersect(boxes[at])
        volumes = pieces.volumes()
        is_met = volumes > 0
        cell, at, pieces = cell[is_met], at[is_met], pieces[is_met]
        found = np.bincount(at, weights=volumes[is_met], minlength=len(boxes))
        for lacking in np.flatnonzero(found != boxes.volumes())[:1]:
            _refuse_missing(world, int(order[lacking]), pieces[at == lacking])
        row = order[at]
        item = np.minimum(itemsizes(held.dtype[cell]), itemsizes(rows.dtype[row]))
        pieces, part_of = _split(pieces, item, chunk_bytes)
        num_bytes, row = pieces.volumes() * item[part_of], row[part_of]
        bounds = np.searchsorted(rows.table[row], np.arange(len(world.destinations.tables) + 1)).tolist()
        return cls(row, cell[part_of], pieces, num_bytes, bounds)


def _check_unique(world: World, order: IntArray) -> None:
    """Prove that no map has two homes for an element; `order` sorts the rows by map."""
    rows = world.destinations.rows
    key = rows.table[order] * len(world.names) + rows.boxes.tensor[order]
    by_key = order[np.argsort(key, kind="stable")]
    keyed = replace(rows.boxes[by_key], tensor=np.sort(key))
    if overlap := first_overlap(keyed):
        a, b = (rows.boxes[by_key[[at]]] for at in overlap)
        place = world.destinations.tables[int(rows.table[by_key[overlap[0]]])].place
        raise ReshardError(f"{place}: {_describe(a.intersect(b), world)} has two homes in the destination's map")


def _refuse_missing(world: World, row: int, pieces: Boxes) -> None:
    rows = world.destinations.rows
    place, wanted = world.destinations.tables[int(rows.table[row])].place, rows.boxes[[row]]
    missing = first_missing(wanted.box(0), pieces.boxes())
    lacking = Boxes(wanted.tensor, np.array([missing.start]), np.array([missing.stop]))
    raise ReshardError(
        f"{_describe(lacking, world)}: no source holds it, but {place} needs {_describe(wanted, world)} for "
        f"{rows.local_names[rows.local[row]]}; check that both sides describe the same model"
    )


def _describe(boxes: Boxes, world: World) -> str:
    """Return name and range of the first box."""
    number, box = int(boxes.tensor[0]), boxes.box(0)
    ndim = int(world.ndims[number])
    return f"{world.names[number]} {Box(box.start[:ndim], box.stop[:ndim])}"


def _split(pieces: Boxes, item: IntArray, chunk_bytes: int) -> tuple[Boxes, IntArray]:
    """Cut pieces along their first dimension into parts of at most `chunk_bytes`, where that is possible.

    Returns:
        The parts, and [num_parts] int64, the piece of each.
    """
    per_part = pieces.stop[:, 0] - pieces.start[:, 0]
    counts, volumes = np.ones_like(item), pieces.volumes()
    large = np.flatnonzero(volumes * item > chunk_bytes)
    rows = per_part[large]
    per_part[large] = np.maximum(1, chunk_bytes // (volumes[large] // rows * item[large]))
    counts[large] = -(-rows // per_part[large])
    part_of = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(part_of)) - (np.cumsum(counts) - counts).take(part_of)
    parts, extent = pieces[part_of], per_part.take(part_of)
    first = parts.start[:, 0] + index * extent
    parts.stop[:, 0] = np.minimum(first + extent, parts.stop[:, 0])
    parts.start[:, 0] = first
    return parts, part_of
