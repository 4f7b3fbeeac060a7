"""A reshard plan: which bytes go from where to where, as frozen data.

Built by ``planner.py``, priced and printed without a process, executed by ``executor.py``. No torch, no process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from hybridrl.layout.shard import CanonicalTensor, Place
from hybridrl.reshard.moves import Move, MoveTable, Region

__all__ = ["Chunk", "Move", "Plan", "Region"]


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
    """Every move from `sources` to `destinations`, or only those of one rank.

    Attributes:
        moves: Ordered by destination, then chunk.
        chunks: Per destination; empty for destinations that a rank's part does not describe.
    """

    sources: tuple[Place, ...]
    destinations: tuple[Place, ...]
    moves: MoveTable
    chunks: tuple[tuple[Chunk, ...], ...]

    @cached_property
    def canonical(self) -> Mapping[str, CanonicalTensor]:
        """Shape of every tensor that moves."""
        return self.moves.canonical()

    @cached_property
    def wire_bytes(self) -> int:
        """Payload bytes that leave the memory of a device."""
        return int(self.moves.num_bytes[self.moves.is_wire].sum())

    def messages(self) -> Iterator[tuple[tuple[int, int, int], list[Move]]]:
        """Yield ((destination, chunk, source), moves) in execution order."""
        grouped: dict[tuple[int, int, int], list[Move]] = {}
        for move in self.moves:
            grouped.setdefault((move.destination, move.chunk, move.source), []).append(move)
        yield from grouped.items()
