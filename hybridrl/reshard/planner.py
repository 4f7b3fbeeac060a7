"""Builds the plan: the intersection of source boxes with destination boxes.

Pure and deterministic: equal inputs give equal plans on every rank. A plan is proved while it is built:

* Source cells of a tensor are disjoint boxes, each with the sources that hold it. A destination box is cut by the cells;
  the pieces are disjoint, so when their volumes add up to the volume of the box, every element is received exactly once.
* Each destination's own map was proved to write every local element exactly once (``layout/builder.py``).

Among the holders of a piece the same device wins, then the same node, then the holder that serves the fewest bytes so far.

Worked example: down_proj of shape (16, 8) held by two sources as columns 0:4 and 4:8; a destination wants rows 0:8. It gets
two moves, [0:8, 0:4] from the first source and [0:8, 4:8] from the second; 32 + 32 = 64 elements, the volume of [0:8, 0:8].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hybridrl.errors import ReshardError
from hybridrl.layout.box import Box
from hybridrl.layout.shard import CanonicalTensor, Place, Shard, ShardMap
from hybridrl.reshard.plan import Chunk, Move, Plan, Region

DEFAULT_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Cell:
    """A box that its holders all have: (source index, shard that contains the box)."""

    box: Box
    holders: tuple[tuple[int, Shard], ...]


def build_plan(
    sources: Sequence[ShardMap], destinations: Sequence[ShardMap], *, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> Plan:
    """Plan every element of every destination.

    Args:
        chunk_bytes: Bound on what a destination receives per chunk, hence on its staging memory.

    Raises:
        ReshardError: Naming the parameter and range when no source holds it, shapes differ, or a destination holds a
            canonical element twice.
    """
    _check_shapes([*sources, *destinations])
    cells = {tensor: _cells(holders) for tensor, holders in _holders(sources).items()}
    loads = [0] * len(sources)
    moves: list[Move] = []
    chunks: list[tuple[Chunk, ...]] = []
    for index, destination in enumerate(destinations):
        _check_unique(destination)
        wanted = _moves_to(index, destination, sources, cells, loads)
        split = [part for move in wanted for part in _split(move, chunk_bytes)]
        placed, own_chunks = _assign_chunks(destination, split, chunk_bytes)
        moves += placed
        chunks.append(own_chunks)
    canonical: dict[str, CanonicalTensor] = {}
    for destination in destinations:
        canonical |= destination.canonical
    return Plan(
        tuple(m.place for m in sources), tuple(m.place for m in destinations), tuple(moves), tuple(chunks), canonical
    )


def lower_bound_bytes(sources: Sequence[ShardMap], destinations: Sequence[ShardMap]) -> int:
    """Return the fewest bytes that any plan can put on the wire.

    What each destination must receive and its device does not hold already: the volume of its boxes less their overlap
    with what sources on the same device hold, in the narrower element type of the two sides. Computed from the maps alone.
    """
    source_item = {shard.tensor: m.tensors[shard.local].dtype.itemsize for m in sources for shard in m.shards}
    total = 0
    for destination in destinations:
        held = _holders([m for m in sources if _same_device(m.place, destination.place)])
        own = {tensor: [cell.box for cell in _cells(holders)] for tensor, holders in held.items()}
        for shard in destination.shards:
            overlaps = (shard.box.intersect(box) for box in own.get(shard.tensor, ()))
            missing = shard.box.num_elements - sum(box.num_elements for box in overlaps if box)
            itemsize = destination.tensors[shard.local].dtype.itemsize
            total += missing * min(itemsize, source_item.get(shard.tensor, itemsize))
    return total


def _check_shapes(maps: Iterable[ShardMap]) -> None:
    shapes: dict[str, tuple[tuple[int, ...], Place]] = {}
    for shard_map in maps:
        for name, tensor in shard_map.canonical.items():
            shape, place = shapes.setdefault(name, (tensor.shape, shard_map.place))
            if shape != tensor.shape:
                raise ReshardError(f"{name}: shape {shape} at {place}, but {tensor.shape} at {shard_map.place}")


def _holders(sources: Sequence[ShardMap]) -> dict[str, dict[Box, list[tuple[int, Shard]]]]:
    holders: dict[str, dict[Box, list[tuple[int, Shard]]]] = {}
    for index, source in enumerate(sources):
        for shard in source.shards:
            holders.setdefault(shard.tensor, {}).setdefault(shard.box, []).append((index, shard))
    return holders


def _cells(holders: dict[Box, list[tuple[int, Shard]]]) -> list[_Cell]:
    boxes = sorted(holders)
    if not any(a.intersect(b) for a, b in _neighbours(boxes)):
        return [_Cell(box, tuple(holders[box])) for box in boxes]
    cuts = [sorted({edge for box in boxes for edge in (box.start[d], box.stop[d])}) for d in range(len(boxes[0].start))]
    cells = []
    for spans in itertools.product(*(itertools.pairwise(edges) for edges in cuts)):
        cell = Box(tuple(a for a, _ in spans), tuple(b for _, b in spans))
        found = tuple(entry for box in boxes if box.contains(cell) for entry in holders[box])
        if found:
            cells.append(_Cell(cell, found))
    return cells


def _neighbours(boxes: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Yield the pairs of sorted boxes whose first ranges meet; all others are disjoint."""
    for i, box in enumerate(boxes):
        for other in itertools.islice(boxes, i + 1, None):
            if box.start and other.start[0] >= box.stop[0]:
                break
            yield box, other


def _check_unique(destination: ShardMap) -> None:
    for tensor, shards in destination.by_tensor().items():
        boxes = sorted(shard.box for shard in shards)
        for a, b in _neighbours(boxes):
            if common := a.intersect(b):
                raise ReshardError(f"{destination.place}: {tensor} {common} has two homes in the destination's map")


def _moves_to(
    index: int, destination: ShardMap, sources: Sequence[ShardMap], cells: dict[str, list[_Cell]], loads: list[int]
) -> Iterator[Move]:
    for shard in destination.shards:
        pieces = [(cell, box) for cell in cells.get(shard.tensor, ()) if (box := cell.box.intersect(shard.box))]
        if sum(box.num_elements for _, box in pieces) != shard.box.num_elements:
            missing = _first_missing(shard.box, [box for _, box in pieces])
            raise ReshardError(
                f"{shard.tensor} {missing}: no source holds it, but {destination.place} needs {shard.box} for "
                f"{shard.local}; check that both sides describe the same model"
            )
        for cell, box in pieces:
            source, holder = _choose(cell, sources, destination.place, loads)
            move = Move(
                tensor=shard.tensor,
                box=box,
                source=source,
                destination=index,
                read=_region(holder, box, sources[source]),
                write=_region(shard, box, destination),
                chunk=0,
                is_wire=not _same_device(sources[source].place, destination.place),
            )
            loads[source] += move.num_bytes
            yield move


def _choose(cell: _Cell, sources: Sequence[ShardMap], to: Place, loads: list[int]) -> tuple[int, Shard]:
    def cost(entry: tuple[int, Shard]) -> tuple[bool, bool, int, int]:
        place = sources[entry[0]].place
        return not _same_device(place, to), place.node != to.node, loads[entry[0]], entry[0]

    return min(cell.holders, key=cost)


def _same_device(a: Place, b: Place) -> bool:
    return (a.node, a.device) == (b.node, b.device)


def _region(shard: Shard, box: Box, shard_map: ShardMap) -> Region:
    return Region(shard.local, shard.offset_of(box), shard.strides, shard_map.tensors[shard.local].dtype)


def _first_missing(want: Box, have: list[Box]) -> Box:
    """Return a part of `want` that no box of `have` covers."""
    cuts = [
        sorted({want.start[d], want.stop[d], *(edge for box in have for edge in (box.start[d], box.stop[d]))})
        for d in range(len(want.start))
    ]
    for spans in itertools.product(*(itertools.pairwise(edges) for edges in cuts)):
        cell = Box(tuple(a for a, _ in spans), tuple(b for _, b in spans))
        if not any(box.contains(cell) for box in have):
            return cell
    raise AssertionError((want, have))


def _split(move: Move, chunk_bytes: int) -> Iterator[Move]:
    """Cut a move along its first dimension into parts of at most `chunk_bytes`, where that is possible."""
    rows = move.box.shape[0] if move.box.shape else 1
    per_part = max(1, chunk_bytes * rows // max(1, move.num_bytes))
    if per_part >= rows:
        yield move
        return
    for start in range(0, rows, per_part):
        box = Box(
            (move.box.start[0] + start, *move.box.start[1:]),
            (min(move.box.start[0] + start + per_part, move.box.stop[0]), *move.box.stop[1:]),
        )
        read, write = (replace(r, offset=r.offset + start * r.strides[0]) for r in (move.read, move.write))
        yield replace(move, box=box, read=read, write=write)


def _assign_chunks(destination: ShardMap, moves: list[Move], chunk_bytes: int) -> tuple[list[Move], tuple[Chunk, ...]]:
    """Fill chunks in the order of the destination's local tensors."""
    order = {name: position for position, name in enumerate(destination.tensors)}
    chunk, filled = 0, 0
    placed: list[Move] = []
    for move in sorted(moves, key=lambda m: order[m.write.local]):
        if filled and filled + move.num_bytes > chunk_bytes:
            chunk, filled = chunk + 1, 0
        filled += move.num_bytes
        placed.append(replace(move, chunk=chunk))
    last_chunk = {move.write.local: move.chunk for move in placed}
    touched: list[dict[str, None]] = [{} for _ in range(chunk + 1)]
    for move in placed:
        touched[move.chunk][move.write.local] = None
    return placed, tuple(
        Chunk(index, tuple(names), tuple(name for name in names if last_chunk[name] == index))
        for index, names in enumerate(touched)
    )
