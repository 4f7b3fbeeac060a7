"""The fewest bytes that any plan can put on the wire, from the maps alone.

What each destination must receive and its device does not hold already: the volume of its boxes less their overlap with what
sources on the same device hold, in the narrower element type of the two sides.
"""

from __future__ import annotations

import numpy as np

from hybridrl.reshard.boxes import Boxes, IntArray, disjoint_cells, match
from hybridrl.reshard.geometry import Maps, Side, World
from hybridrl.reshard.table import itemsizes


def lower_bound_bytes(sources: Maps, destinations: Maps) -> int:
    """Return the fewest bytes that any plan can put on the wire, over all destinations."""
    return sum(lower_bounds(sources, destinations))


def lower_bounds(sources: Maps, destinations: Maps) -> list[int]:
    """Return the fewest bytes that each destination must take off the wire."""
    world = World.of(sources, destinations)
    item = _source_itemsizes(world)
    on_device: dict[tuple[str, str], list[int]] = {}
    for place, table in zip(world.sources.places, world.sources.table_of, strict=True):
        on_device.setdefault((place.node, place.device), []).append(table)
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    bounds = []
    for place, table in zip(world.destinations.places, world.destinations.table_of, strict=True):
        key = (table, tuple(on_device.get((place.node, place.device), ())))
        if key not in known:
            known[key] = _missing_bytes(world.sources, world.destinations, *key, item)
        bounds.append(known[key])
    return bounds


def _source_itemsizes(world: World) -> IntArray:
    """Return the bytes per element of each tensor at its sources."""
    rows = world.sources.rows
    item = np.full(len(world.names), np.iinfo(np.int64).max)
    item[rows.boxes.tensor] = itemsizes(rows.dtype)
    return item


def _missing_bytes(sources: Side, destinations: Side, table: int, local: tuple[int, ...], item: IntArray) -> int:
    wanted, dtype = _rows_of(destinations, table)
    missing = wanted.volumes()
    if local:
        held = disjoint_cells(Boxes.concatenate([_rows_of(sources, own)[0] for own in local])).boxes
        i, j = match(held.tensor, wanted.tensor)
        np.subtract.at(missing, j, held[i].intersect(wanted[j]).volumes())
    return int((missing * np.minimum(itemsizes(dtype), item[wanted.tensor])).sum())


def _rows_of(side: Side, table: int) -> tuple[Boxes, IntArray]:
    own = np.arange(len(side.tables[table].tensor)) + side.rows.first[table]
    return side.rows.boxes[own], side.rows.dtype[own]
