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

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.reshard.balance import Wish, deal_out
from hybridrl.reshard.bound import lower_bound_bytes
from hybridrl.reshard.boxes import Boxes, IntArray
from hybridrl.reshard.geometry import Held, Maps, Rows, Wanted, World
from hybridrl.reshard.moves import MoveTable, RegionTable
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.schedule import Schedule

DEFAULT_CHUNK_BYTES = 64 << 20
_NONE: IntArray = np.zeros(0, dtype=np.int64)

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "Planner",
    "build_plan",
    "lower_bound_bytes",
    "plan_for_destination",
    "plan_for_source",
]


def build_plan(
    sources: Maps, destinations: Maps, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES, is_staggered: bool = False
) -> Plan:
    """Plan every element of every destination.

    Args:
        chunk_bytes: Bound on what a destination receives per chunk, hence on its staging memory.
        is_staggered: Whether destinations begin at different layers (``schedule.py``).

    Raises:
        ReshardError: Naming the parameter and range when no source holds it, shapes differ, or a destination holds a
            canonical element twice.
    """
    return Planner(sources, destinations, chunk_bytes=chunk_bytes, is_staggered=is_staggered).whole()


def plan_for_source(
    sources: Maps,
    destinations: Maps,
    source: int,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    is_staggered: bool = False,
) -> Plan:
    """Plan what one source serves: the moves of :func:`build_plan` that name it, in the same order."""
    return Planner(sources, destinations, chunk_bytes=chunk_bytes, is_staggered=is_staggered).for_source(source)


def plan_for_destination(
    sources: Maps,
    destinations: Maps,
    destination: int,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    is_staggered: bool = False,
) -> Plan:
    """Plan what one destination receives: its moves of :func:`build_plan`, in the same order, and its chunks."""
    planner = Planner(sources, destinations, chunk_bytes=chunk_bytes, is_staggered=is_staggered)
    return planner.for_destination(destination)


class Planner:
    """All choices of a plan, made once; parts of it become moves on demand.

    Raises:
        ReshardError: As :func:`build_plan`.
    """

    def __init__(
        self,
        sources: Maps,
        destinations: Maps,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        is_staggered: bool = False,
    ) -> None:
        self._world = world = World.of(sources, destinations)
        self._held = held = Held.of(world)
        self._wanted = wanted = Wanted.of(world, held, chunk_bytes)
        own = [slice(*wanted.bounds[m : m + 2]) for m in range(len(world.destinations.tables))]
        wishes = [Wish.of(held.holder_set[wanted.cell[part]], wanted.num_bytes[part]) for part in own]
        demands = [
            (place, wishes[m]) for place, m in zip(world.destinations.places, world.destinations.table_of, strict=True)
        ]
        self._deals = deal_out(world.sources.places, _ranks_of_sets(world, held), demands)
        self._schedule = Schedule(world, wanted, chunk_bytes, is_staggered=is_staggered)

    def whole(self) -> Plan:
        """Return every move."""
        every = range(len(self._deals))
        return self._plan([self._received_by(destination) for destination in every], every)

    def for_source(self, source: int) -> Plan:
        """Return what one source serves."""
        parts = []
        for destination, deals in enumerate(self._deals):
            pieces = np.concatenate([_NONE, *(deal.pieces_of(source) for deal in deals)])
            if len(pieces):
                pieces = self._schedule.in_order(destination, pieces)
                parts.append(_Part(destination, pieces, np.full_like(pieces, source)))
        return self._plan(parts, ())

    def for_destination(self, destination: int) -> Plan:
        """Return what one destination receives, and its chunks."""
        return self._plan([self._received_by(destination)], (destination,))

    def _received_by(self, destination: int) -> _Part:
        deals = self._deals[destination]
        pieces = np.concatenate([_NONE, *(deal.pieces for deal in deals)])
        sources = np.empty_like(pieces)
        sources[pieces] = np.concatenate([_NONE, *(deal.sources() for deal in deals)])
        ordered = self._schedule.in_order(destination, pieces)
        return _Part(destination, ordered, sources[ordered])

    def _plan(self, parts: Sequence[_Part], described: Collection[int]) -> Plan:
        sources, destinations = self._world.sources.places, self._world.destinations.places
        every = range(len(destinations))
        chunks = tuple(self._schedule.chunks(d) if d in described else () for d in every)
        return Plan(sources, destinations, self._moves(parts), chunks)

    def _moves(self, parts: Sequence[_Part]) -> MoveTable:
        world, held, wanted = self._world, self._held, self._wanted
        first = [wanted.bounds[world.destinations.table_of[part.destination]] for part in parts]
        piece = np.concatenate([_NONE, *(part.pieces + at for part, at in zip(parts, first, strict=True))])
        source = np.concatenate([_NONE, *(part.sources for part in parts)])
        sizes = np.array([len(part.pieces) for part in parts], dtype=np.int64)
        destination = np.repeat(np.array([part.destination for part in parts], dtype=np.int64), sizes)
        pair = wanted.cell[piece] * len(world.sources.tables) + np.array(world.sources.table_of)[source]
        boxes = wanted.boxes[piece]
        device_of_source, device_of_destination = _number_devices(world)
        return MoveTable(
            names=world.names,
            shapes=world.shapes,
            ndims=world.ndims,
            boxes=boxes,
            source=source,
            destination=destination,
            chunk=np.concatenate([_NONE, *(self._schedule.chunk_of(p.destination)[p.pieces] for p in parts)]),
            is_wire=device_of_source[source] != device_of_destination[destination],
            read=_regions(world.sources.rows, held.row[np.searchsorted(held.pair, pair)], boxes),
            write=_regions(world.destinations.rows, wanted.row[piece], boxes),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Pieces of one destination in the order in which it receives them, and who serves each."""

    destination: int
    pieces: IntArray
    sources: IntArray


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
