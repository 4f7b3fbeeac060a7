"""A reshard plan: which bytes go from where to where, as frozen data.

Built by ``planner.py``, priced and printed without a process, executed by ``executor.py``. No torch, no process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from hybridrl.errors import ReshardError
from hybridrl.layout.shard import CanonicalTensor, Place
from hybridrl.reshard.moves import Move, MoveTable, Region
from hybridrl.reshard.sizes import MessageSizes

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
        relays: Moves between destinations of one node: `source` is an index into `destinations`, and a relay follows the move
            that brought its box there. Only plans for pricing have any.
        sizes: Of all messages to the destinations that a source's part names; None where the moves say it.
    """

    sources: tuple[Place, ...]
    destinations: tuple[Place, ...]
    moves: MoveTable
    chunks: tuple[tuple[Chunk, ...], ...]
    relays: MoveTable
    sizes: MessageSizes | None = None

    @cached_property
    def canonical(self) -> Mapping[str, CanonicalTensor]:
        """Shape of every tensor that moves."""
        return self.moves.canonical()

    @cached_property
    def wire_bytes(self) -> int:
        """Payload bytes that leave the memory of a device."""
        return sum(int(moves.num_bytes[moves.is_wire].sum()) for moves in (self.moves, self.relays))

    def messages(self) -> Iterator[tuple[tuple[int, int, int], list[Move]]]:
        """Yield ((destination, chunk, source), moves) in execution order.

        Raises:
            ReshardError: When destinations relay to each other, which no transport does.
        """
        if len(self.relays):
            raise ReshardError(
                "a plan that shares inside nodes can be priced but not executed; build it without is_shared"
            )
        grouped: dict[tuple[int, int, int], list[Move]] = {}
        for move in self.moves:
            grouped.setdefault((move.destination, move.chunk, move.source), []).append(move)
        yield from grouped.items()
