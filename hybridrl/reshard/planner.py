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

import functools
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from hybridrl.layout.shard import Place
from hybridrl.reshard.assignment import NO_RELAYS, Assignment, Direct, Relays, Services, Shared
from hybridrl.reshard.bound import lower_bound_bytes
from hybridrl.reshard.boxes import Boxes, IntArray
from hybridrl.reshard.geometry import Held, Maps, Rows, Wanted, World
from hybridrl.reshard.moves import MoveTable, RegionTable
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.schedule import Schedule

DEFAULT_CHUNK_BYTES = 64 << 20

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "Planner",
    "build_plan",
    "lower_bound_bytes",
    "plan_for_destination",
    "plan_for_source",
]


def build_plan(
    sources: Maps,
    destinations: Maps,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    is_staggered: bool = False,
    is_shared: bool = False,
) -> Plan:
    """Plan every element of every destination.

    Args:
        chunk_bytes: Bound on what a destination receives per chunk, hence on its staging memory.
        is_staggered: Whether destinations begin at different layers (``schedule.py``).
        is_shared: Whether what several destinations of a node want crosses into it once (``assignment.py``); such a plan
            needs a transport that carries relays, shm or mixed.

    Raises:
        ReshardError: Naming the parameter and range when no source holds it, shapes differ, or a destination holds a
            canonical element twice.
    """
    planner = Planner(sources, destinations, chunk_bytes=chunk_bytes, is_staggered=is_staggered, is_shared=is_shared)
    return planner.whole()


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
        is_shared: bool = False,
    ) -> None:
        self._world = world = World.of(sources, destinations)
        self._held = held = Held.of(world)
        self._wanted = wanted = Wanted.of(world, held, chunk_bytes)
        self._assigned: Assignment = (Shared if is_shared else Direct)(world, held, wanted)
        self._schedule = Schedule(world, wanted, chunk_bytes, is_staggered=is_staggered, is_shared=is_shared)

    @property
    def places(self) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
        """Sources and destinations, in the order of their maps."""
        return self._world.sources.places, self._world.destinations.places

    def whole(self) -> Plan:
        """Return every move."""
        return self._plan(self._assigned.services(), self._assigned.relays, range(len(self._world.destinations.places)))

    def moves_only(self) -> Plan:
        """Return every move without naming the chunks' local tensors: all that a price needs, in a third of the time."""
        return self._plan(self._assigned.services(), self._assigned.relays, ())

    def for_source(self, source: int) -> Plan:
        """Return what one source serves."""
        return self._plan(self._assigned.served_by(source), NO_RELAYS, ())

    def for_destination(self, destination: int) -> Plan:
        """Return what one destination receives and passes on, and its chunks."""
        relays = self._assigned.relays
        own = np.flatnonzero((relays.destination == destination) | (relays.peer == destination))
        return self._plan(self._assigned.received_by(destination), relays.where(own), (destination,))

    def _plan(self, services: Services, relays: Relays, described: Collection[int]) -> Plan:
        sources, destinations = self.places
        chunks = [self._schedule.chunks(d) if d in described else () for d in range(len(destinations))]
        return Plan(sources, destinations, self._direct(services), tuple(chunks), self._relayed(relays))

    def _direct(self, services: Services) -> MoveTable:
        """Make the moves from sources."""
        world, held = self._world, self._held
        order, chunk = self._schedule.placed(services.destination, services.piece)
        own = services.where(order)
        piece = self._numbers(own.destination, own.piece)
        table = np.array(world.sources.table_of, dtype=np.int64)[own.source]
        pair = self._wanted.cell[piece] * len(world.sources.tables) + table
        row = held.row[np.searchsorted(held.pair, pair)]
        device_of_source, device_of_destination = _number_devices(world)
        is_wire = device_of_source[own.source] != device_of_destination[own.destination]
        return self._table(own.source, own.destination, piece, chunk[order], is_wire, world.sources.rows, row)

    def _relayed(self, relays: Relays) -> MoveTable:
        """Make the moves between destinations."""
        order, chunk = self._schedule.placed(relays.destination, relays.piece)
        own, rows = relays.where(order), self._world.destinations.rows
        piece = self._numbers(own.destination, own.piece)
        row = self._wanted.row[self._numbers(own.peer, own.peer_piece)]
        is_wire = np.ones(len(piece), dtype=bool)
        return self._table(own.peer, own.destination, piece, chunk[order], is_wire, rows, row)

    def _numbers(self, destination: IntArray, piece: IntArray) -> IntArray:
        """Return where the pieces of destinations are in `self._wanted`."""
        bounds, table_of = (
            np.array(own, dtype=np.int64) for own in (self._wanted.bounds, self._world.destinations.table_of)
        )
        numbers: IntArray = piece + bounds[table_of[destination]]
        return numbers

    def _table(
        self,
        source: IntArray,
        destination: IntArray,
        piece: IntArray,
        chunk: IntArray,
        is_wire: NDArray[np.bool_],
        rows: Rows,
        row: IntArray,
    ) -> MoveTable:
        world, boxes = self._world, self._wanted.boxes[piece]
        return MoveTable(
            names=world.names,
            shapes=world.shapes,
            ndims=world.ndims,
            boxes=boxes,
            source=source,
            destination=destination,
            chunk=chunk,
            is_wire=is_wire,
            read=_regions(rows, row, boxes),
            write=_regions(world.destinations.rows, self._wanted.row[piece], boxes),
        )


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
    strides = rows.strides.take(row, axis=0)
    offset = rows.offset[row] + functools.reduce(
        np.add, ((boxes.start - rows.boxes.start.take(row, axis=0)) * strides).T
    )
    used, local = np.unique(rows.local[row], return_inverse=True)
    names = tuple(map(rows.local_names.__getitem__, used.tolist()))
    return RegionTable(names, local, offset, strides, rows.dtype[row])
