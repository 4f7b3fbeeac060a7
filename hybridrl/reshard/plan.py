"""A reshard plan: which bytes go from where to where, as frozen data.

Built by ``planner.py``, priced and printed without a process, executed by ``executor.py``. No torch, no process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from hybridrl.layout.box import Box, DType
from hybridrl.layout.shard import CanonicalTensor, Place


@dataclass(frozen=True, slots=True)
class Region:
    """A strided view of a local tensor: element offset, and element stride per canonical dimension."""

    local: str
    offset: int
    strides: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Move:
    """One box that goes from one source to one destination.

    Attributes:
        source: Index into the plan's sources.
        destination: Index into the plan's destinations.
        chunk: Index into the destination's chunks.
        is_wire: Whether the bytes leave the memory of a device.
    """

    tensor: str
    box: Box
    source: int
    destination: int
    read: Region
    write: Region
    chunk: int
    is_wire: bool

    @property
    def wire_dtype(self) -> DType:
        """Element type that travels: the narrower of the two sides."""
        return min(self.read.dtype, self.write.dtype, key=lambda dtype: dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        """Payload bytes of this move."""
        return self.box.num_elements * self.wire_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """A step of one destination: bounded bytes, in the order of its local tensors.

    Attributes:
        locals: Local tensors that the chunk writes into.
        completed: Local tensors that are whole once the chunk is done.
    """

    index: int
    locals: tuple[str, ...]
    completed: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Every move from `sources` to `destinations`.

    Attributes:
        moves: Ordered by destination, then chunk.
        chunks: Per destination.
        canonical: Shape of every tensor that moves.
    """

    sources: tuple[Place, ...]
    destinations: tuple[Place, ...]
    moves: tuple[Move, ...]
    chunks: tuple[tuple[Chunk, ...], ...]
    canonical: Mapping[str, CanonicalTensor]

    @cached_property
    def wire_bytes(self) -> int:
        """Payload bytes that leave the memory of a device."""
        return sum(move.num_bytes for move in self.moves if move.is_wire)

    def messages(self) -> Iterator[tuple[tuple[int, int, int], list[Move]]]:
        """Yield ((destination, chunk, source), moves) in execution order."""
        grouped: dict[tuple[int, int, int], list[Move]] = {}
        for move in self.moves:
            grouped.setdefault((move.destination, move.chunk, move.source), []).append(move)
        yield from grouped.items()
