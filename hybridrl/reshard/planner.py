"""Builds the plan: the intersection of source boxes with destination boxes.

Pure and deterministic: equal inputs give equal plans on every rank. A plan is proved while it is built:

* Source cells of a tensor are disjoint boxes, each with the sources that hold it. A destination box is cut by the cells;
  the pieces are disjoint, so when their volumes add up to the volume of the box, every element is received exactly once.
* Each destination's own map was proved to write every local element exactly once (``layout/builder.py``).

Among the holders of a piece the same device wins, then the same node; equally near ones share the work (``balance.py``).
Replicas have equal maps, so cells and pieces are computed once per *distinct* map, and a rank makes moves of its own part only.

Worked example: down_proj of shape (16, 8) held by two sources as columns 0:4 and 4:8; a destination wants rows 0:8. It gets
two moves, [0:8, 0:4] from the first source and [0:8, 4:8] from the second; 32 + 32 = 64 elements, the volume of [0:8, 0:8].
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from hybridrl.reshard.balance import Demand, choose_sources
from hybridrl.reshard.bound import lower_bound_bytes
from hybridrl.reshard.boxes import Boxes, IntArray
from hybridrl.reshard.geometry import Held, Maps, Rows, Wanted, World
from hybridrl.reshard.moves import MoveTable, RegionTable
from hybridrl.reshard.plan import Chunk, Plan

DEFAULT_CHUNK_BYTES = 64 << 20

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "Planner",
    "build_plan",
    "lower_bound_bytes",
    "plan_for_destination",
    "plan_for_source",
]


def build_plan(sources: Maps, destinations: Maps, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> Plan:
    """Plan every element of every destination.

    Args:
        chunk_bytes: Bound on what a destination receives per chunk, hence on its staging memory.

    Raises:
        ReshardError: Naming the parameter and range when no source holds it, shapes differ, or a destination holds a
            canonical element twice.
    """
    return Planner(sources, destinations, chunk_bytes=chunk_bytes).whole()


def plan_for_source(sources: Maps, destinations: Maps, source: int, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> Plan:
    """Plan what one source serves: the moves of :func:`build_plan` that name it, in the same order."""
    return Planner(sources, destinations, chunk_bytes=chunk_bytes).for_source(source)


def plan_for_destination(
    sources: Maps, destinations: Maps, destination: int, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> Plan:
    """Plan what one destination receives: its moves of :func:`build_plan`, in the same order, and its chunks."""
    return Planner(sources, destinations, chunk_bytes=chunk_bytes).for_destination(destination)


class Planner:
    """All choices of a plan, made once; parts of it become moves on demand.

    Raises:
        ReshardError: As :func:`build_plan`.
    """

    def __init__(self, sources: Maps, destinations: Maps, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self._world = world = World.of(sources, destinations)
        self._held = held = Held.of(world.sources, world.canonical)
        self._wanted = wanted = Wanted.of(world, held, chunk_bytes)
        holder_set = held.holder_set[wanted.cell]
        pieces = [slice(wanted.bounds[m], wanted.bounds[m + 1]) for m in world.destinations.table_of]
        demands = [
            Demand(place, holder_set[own], wanted.num_bytes[own])
            for place, own in zip(world.destinations.places, pieces, strict=True)
        ]
        sizes = [own.stop - own.start for own in pieces]
        self._destination = np.repeat(np.arange(len(sizes)), sizes)
        self._piece = np.concatenate([np.arange(own.start, own.stop) for own in pieces])
        self._source = choose_sources(world.sources.places, _ranks_of_sets(world, held), demands)

    def whole(self) -> Plan:
        """Return every move."""
        return self._plan(np.arange(len(self._source)), range(len(self._world.destinations.places)))

    def for_source(self, source: int) -> Plan:
        """Return what one source serves."""
        return self._plan(np.flatnonzero(self._source == source), ())

    def for_destination(self, destination: int) -> Plan:
        """Return what one destination receives, and its chunks."""
        first, last = np.searchsorted(self._destination, [destination, destination + 1])
        return self._plan(np.arange(first, last), (destination,))

    def _plan(self, rows: IntArray, described: Collection[int]) -> Plan:
        world, moves = self._world, self._moves(rows)
        chunks = {m: self._chunks(m) for m in {world.destinations.table_of[d] for d in described}}
        return Plan(
            world.sources.places,
            world.destinations.places,
            moves,
            tuple(chunks[m] if d in described else () for d, m in enumerate(world.destinations.table_of)),
            {world.canonical[i].name: world.canonical[i] for i in np.unique(moves.boxes.tensor)},
        )

    def _moves(self, rows: IntArray) -> MoveTable:
        world, held, wanted = self._world, self._held, self._wanted
        source, destination, piece = self._source[rows], self._destination[rows], self._piece[rows]
        pair = wanted.cell[piece] * len(world.sources.tables) + np.array(world.sources.table_of)[source]
        boxes = wanted.boxes[piece]
        device_of_source, device_of_destination = _number_devices(world)
        return MoveTable(
            names=tuple(tensor.name for tensor in world.canonical),
            ndims=np.array([len(tensor.shape) for tensor in world.canonical], dtype=np.int64),
            boxes=boxes,
            source=source,
            destination=destination,
            chunk=wanted.chunk[piece],
            is_wire=device_of_source[source] != device_of_destination[destination],
            read=_regions(world.sources.rows, held.row[np.searchsorted(held.pair, pair)], boxes),
            write=_regions(world.destinations.rows, wanted.row[piece], boxes),
        )

    def _chunks(self, table: int) -> tuple[Chunk, ...]:
        """Return the chunks of a destination map; both its pieces' local tensors and their chunks ascend."""
        rows, wanted = self._world.destinations.rows, self._wanted
        own = slice(wanted.bounds[table], wanted.bounds[table + 1])
        local, chunk = rows.local[wanted.row[own]], wanted.chunk[own]
        is_new = (np.diff(local, prepend=-1) != 0) | (np.diff(chunk, prepend=-1) != 0)
        local, chunk = local[is_new], chunk[is_new]
        is_last = np.diff(local, append=-1) != 0
        chunks: list[tuple[list[str], list[str]]] = [([], []) for _ in range(int(chunk[-1]) + 1 if len(chunk) else 0)]
        for name, index, completes in zip(local.tolist(), chunk.tolist(), is_last.tolist(), strict=True):
            touched, completed = chunks[index]
            touched.append(rows.local_names[name])
            if completes:
                completed.append(rows.local_names[name])
        return tuple(Chunk(i, tuple(touched), tuple(completed)) for i, (touched, completed) in enumerate(chunks))


def _ranks_of_sets(world: World, held: Held) -> list[list[int]]:
    ranks: list[list[int]] = [[] for _ in world.sources.tables]
    for rank, table in enumerate(world.sources.table_of):
        ranks[table].append(rank)
    return [sorted(rank for table in tables for rank in ranks[table]) for tables in held.sets]


def _number_devices(world: World) -> tuple[IntArray, IntArray]:
    """Return a number per source and per destination, equal where they are one device."""
    known: dict[tuple[str, str], int] = {}
    sources, destinations = (
        np.array([known.setdefault((p.node, p.device), len(known)) for p in side.places], dtype=np.int64)
        for side in (world.sources, world.destinations)
    )
    return sources, destinations


def _regions(rows: Rows, row: IntArray, boxes: Boxes) -> RegionTable:
    """Return where boxes inside the shards `row` lie in their local tensors; keeps only the names that occur."""
    strides = rows.strides[row]
    offset = rows.offset[row] + ((boxes.start - rows.boxes.start[row]) * strides).sum(axis=1)
    used, local = np.unique(rows.local[row], return_inverse=True)
    return RegionTable(tuple(rows.local_names[i] for i in used), local, offset, strides, rows.dtype[row])
