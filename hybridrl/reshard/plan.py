"""A reshard plan: which bytes go from where to where, as frozen data.

Built by ``planner.py``, priced and printed without a process, executed by ``executor.py``. No torch, no process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hybridrl.layout.shard import CanonicalTensor, Place
from hybridrl.reshard.moves import Move, MoveTable, Region
from hybridrl.reshard.sizes import MessageSizes

__all__ = ["Chunk", "Ends", "Move", "Plan", "Region"]


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
class Ends:
    """The ranks of both sides of a plan."""

    sources: tuple[Place, ...]
    destinations: tuple[Place, ...]

    @cached_property
    def senders(self) -> tuple[Place, ...]:
        """All that send: the sources, then the destinations, which relay."""
        return (*self.sources, *self.destinations)


@dataclass(frozen=True)
class Plan(Ends):
    """Every move from `sources` to `destinations`, or only those of one rank.

    Attributes:
        moves: Ordered by destination, then chunk.
        chunks: Per destination; empty for destinations that a rank's part does not describe.
        relays: Moves between destinations of one node: `source` is an index into `destinations`, and a relay is in the same
            chunk as the move that brought its box there.
        sizes: Of all messages to the destinations that a rank's part sends to, and to itself; None where the moves say it.
    """

    moves: MoveTable
    chunks: tuple[tuple[Chunk, ...], ...]
    relays: MoveTable
    sizes: MessageSizes | None = None

    @cached_property
    def canonical(self) -> Mapping[str, CanonicalTensor]:
        """Shape of every tensor that moves."""
        return self.sent.canonical()

    @cached_property
    def wire_bytes(self) -> int:
        """Payload bytes that leave the memory of a device."""
        return sum(int(moves.num_bytes[moves.is_wire].sum()) for moves in (self.moves, self.relays))

    def wire_bytes_to(self, destination: int) -> int:
        """Return the payload bytes that one destination takes from other devices."""
        sent = self.sent
        return int(sent.num_bytes[sent.is_wire & (sent.destination == destination)].sum())

    @cached_property
    def network_bytes(self) -> int:
        """Payload bytes that leave a node."""
        nodes = {node: i for i, node in enumerate(dict.fromkeys(place.node for place in self.senders))}
        of_source, of_destination = (
            np.array([nodes[place.node] for place in side], dtype=np.int64)
            for side in (self.sources, self.destinations)
        )
        is_far = of_source[self.moves.source] != of_destination[self.moves.destination]
        return int(self.moves.num_bytes[is_far].sum())

    @cached_property
    def sent(self) -> MoveTable:
        """Moves, then relays; `source` is an index into `senders`."""
        relays = replace(self.relays, source=self.relays.source + len(self.sources))
        return MoveTable.concatenate([self.moves, relays]) if len(relays) else self.moves

    def is_near(self, sender: int, destination: int) -> bool:
        """Whether two ranks are on one node."""
        return self.senders[sender].node == self.destinations[destination].node

    def where(self, rows: NDArray[np.bool_]) -> Iterator[tuple[tuple[int, int, int], list[Move]]]:
        """Yield ((destination, chunk, sender), moves) of some rows of `sent`, in execution order."""
        grouped: dict[tuple[int, int, int], list[Move]] = {}
        for move in self.sent.take(rows):
            grouped.setdefault((move.destination, move.chunk, move.source), []).append(move)
        yield from grouped.items()

    def messages(self) -> Iterator[tuple[tuple[int, int, int], list[Move]]]:
        """Yield ((destination, chunk, sender), moves), in execution order."""
        yield from self.where(np.ones(len(self.sent), dtype=bool))
