"""The moves of one message, compiled for its two ends, and moves that need no message.

A message holds its moves end to end, the widest elements first so that every one is aligned. Its ends are the same copies with the
roles of the buffers swapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from hybridrl.layout.box import contiguous_strides
from hybridrl.layout.shard import CanonicalTensor
from hybridrl.observability.heartbeat import HEARTBEAT
from hybridrl.reshard.clock import Clock
from hybridrl.reshard.ops import Side
from hybridrl.reshard.plan import Move, Region
from hybridrl.reshard.program import CopyProgram
from hybridrl.reshard.segments import Copy

Tensors = Mapping[str, torch.Tensor]


class Staging:
    """A device's own copy of a message that lies in host memory; made once, as large as the largest."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Size; 0 as long as no device needed it."""
        return 0 if self._memory is None else self._memory.nbytes

    def like(self, message: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return `message`'s place on `device`."""
        if self._memory is None or self._memory.nbytes < message.nbytes:
            self._memory = torch.empty(message.nbytes, dtype=torch.uint8, device=device)
        return self._memory[: message.nbytes]


class MessageEnd:
    """One end of a message.

    Args:
        side: Which end.
        verify: Whether to sum this end's tensors.
        staging: Shared by the messages of a rank, which come one at a time.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        canonical: Mapping[str, CanonicalTensor],
        side: Side,
        *,
        verify: bool,
        staging: Staging,
    ) -> None:
        self.num_bytes = sum(move.num_bytes for move in moves)
        self.is_wire = moves[0].is_wire
        self._is_source = side is Side.SOURCE
        self._staging = staging
        regions = [move.read if self._is_source else move.write for move in moves]
        buffers = {name: index for index, name in enumerate(dict.fromkeys(region.local for region in regions))}
        self._locals = tuple(buffers)
        self._program = CopyProgram(
            list(_packed(moves, buffers, is_source=self._is_source)), canonical, side if verify else None, buffers
        )

    def run(self, tensors: Tensors, message: torch.Tensor, clock: Clock) -> dict[str, int]:
        """Pack the local tensors into the message, or unpack it into them; return the checksum of each canonical tensor."""
        HEARTBEAT.advance()
        local = [tensors[name] for name in self._locals]
        if local[0].device == message.device:
            return self._copy(local, message, clock)
        staged = self._staging.like(message, local[0].device)
        if self._is_source:
            sums = self._copy(local, staged, clock)
            message.copy_(staged)
            return sums
        staged.copy_(message)
        return self._copy(local, staged, clock)

    def _copy(self, local: Sequence[torch.Tensor], message: torch.Tensor, clock: Clock) -> dict[str, int]:
        sources, destinations = (local, [message]) if self._is_source else ([message], local)
        return dict(zip(self._program.tensors, self._program.run(sources, destinations, clock), strict=True))


class LocalMoves:
    """Moves between tensors of one process: a direct copy, no message."""

    def __init__(
        self, moves: Sequence[Move], canonical: Mapping[str, CanonicalTensor], side: Side, *, verify: bool
    ) -> None:
        read, write = (
            {name: index for index, name in enumerate(dict.fromkeys(names))}
            for names in ([move.read.local for move in moves], [move.write.local for move in moves])
        )
        self._read, self._write = tuple(read), tuple(write)
        copies = [(m, Copy(m.box.shape, read[m.read.local], m.read, write[m.write.local], m.write)) for m in moves]
        is_source = side is Side.SOURCE
        own = read if is_source else write
        self._program = CopyProgram(copies, canonical, side if verify else None, own, sums_only=is_source)

    def run(self, sources: Tensors, destinations: Tensors, clock: Clock) -> dict[str, int]:
        """At the destination copy and return the checksum of each canonical tensor there."""
        sums = self._program.run(
            [sources[name] for name in self._read], [destinations[name] for name in self._write], clock
        )
        return dict(zip(self._program.tensors, sums, strict=True))

    def checksum(self, sources: Tensors, clock: Clock) -> dict[str, int]:
        """At the source return the checksum of each canonical tensor."""
        return dict(
            zip(
                self._program.tensors, self._program.run([sources[name] for name in self._read], [], clock), strict=True
            )
        )


def _packed(moves: Sequence[Move], buffers: Mapping[str, int], *, is_source: bool) -> Iterator[tuple[Move, Copy]]:
    position = 0
    for move in sorted(moves, key=lambda move: -move.wire_dtype.itemsize):
        packed = Region("", position // move.wire_dtype.itemsize, contiguous_strides(move.box.shape), move.wire_dtype)
        local = move.read if is_source else move.write
        sides = (buffers[local.local], local, 0, packed) if is_source else (0, packed, buffers[local.local], local)
        yield move, Copy(move.box.shape, *sides)
        position += move.num_bytes
