"""Executes one rank's part of a plan: pack -> transport -> unpack, with a canonical checksum on each side.

Compiled once per connection into kernel tables; a run only binds addresses. A source packs each message straight into the
transport's buffer; a destination goes chunk by chunk, so that it never holds more than one chunk of staging, and its
:class:`ChunkSink` decides what "write" means (vLLM materialises a module at a time). The checksums are taken from the
source's own tensors and from the destination's own tensors, never from the message, so packing, transport and unpacking
are all inside what is verified.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import torch

from hybridrl.errors import ReshardError
from hybridrl.layout.box import contiguous_strides
from hybridrl.reshard import ops
from hybridrl.reshard.plan import Chunk, Move, Plan, Region
from hybridrl.reshard.segments import ChecksumTable, Copy, Table, checksum_tables, copy_tables
from hybridrl.reshard.transports import Label, Transport


@dataclass(frozen=True, slots=True, order=True)
class PieceKey:
    """What a checksum speaks of: all moves of one tensor between two ranks."""

    tensor: str
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What one rank did in one transfer.

    Attributes:
        checksums: Canonical checksum of each piece; empty when verification is off.
        wire_bytes: Payload that this rank put on or took off the wire, counted from the messages themselves.
        seconds: Time in "copy", "checksum" and "total".
    """

    checksums: Mapping[PieceKey, int]
    wire_bytes: int
    seconds: Mapping[str, float]


class ChunkSink(Protocol):
    """Where a destination's chunks are written."""

    def open(self, chunk: Chunk) -> Mapping[str, torch.Tensor]:
        """Return the local tensors that `chunk.locals` names, contiguous, in load layout."""
        ...

    def close(self, chunk: Chunk) -> None:
        """Take note that everything of `chunk` is written; `chunk.completed` tensors are whole."""
        ...


class TensorSink:
    """A sink that writes into tensors which exist already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def open(self, chunk: Chunk) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the chunk."""
        return {name: self._tensors[name] for name in chunk.locals}

    def close(self, chunk: Chunk) -> None:
        """Do nothing: the tensors are live."""


class _Side:
    """One message, compiled for one of its two ends."""

    def __init__(self, plan: Plan, moves: Sequence[Move], *, is_source: bool) -> None:
        regions = [move.read if is_source else move.write for move in moves]
        self.locals = tuple(dict.fromkeys(region.local for region in regions))
        buffers = {name: index for index, name in enumerate(self.locals)}
        self.num_bytes = sum(move.num_bytes for move in moves)
        self._is_source = is_source
        self._copies: list[tuple[ops.Cast, Table]] = copy_tables(_packed_copies(moves, buffers, is_source=is_source))
        self._tensors = tuple(dict.fromkeys(move.tensor for move in moves))
        slots = {tensor: slot for slot, tensor in enumerate(self._tensors)}
        self._checksums: list[ChecksumTable] = checksum_tables(
            moves, buffers, slots, plan.canonical, is_source=is_source
        )
        self._keys = [PieceKey(tensor, moves[0].source, moves[0].destination) for tensor in self._tensors]

    def copy(self, tensors: Mapping[str, torch.Tensor], message: torch.Tensor) -> None:
        """Pack the local tensors into the message, or unpack it into them."""
        local, packed = ops.buffer_table([tensors[name] for name in self.locals]), ops.buffer_table([message])
        sources, destinations = (local, packed) if self._is_source else (packed, local)
        for cast, table in self._copies:
            ops.segmented_copy(table, sources, destinations, cast=cast)

    def checksum(self, tensors: Mapping[str, torch.Tensor], into: dict[PieceKey, int]) -> None:
        """Add the canonical checksums of this side's local tensors."""
        local = ops.buffer_table([tensors[name] for name in self.locals])
        for part in self._checksums:
            sums = ops.canonical_checksum(
                part.table, local, itemsize=part.itemsize, num_slots=len(self._keys), cast=part.cast
            )
            for key, value in zip(self._keys, sums.tolist(), strict=True):
                into[key] = (into.get(key, 0) + value) % 2**64


def _packed_copies(moves: Sequence[Move], buffers: Mapping[str, int], *, is_source: bool) -> list[tuple[str, Copy]]:
    """Lay the moves end to end in the message, the widest elements first so that every one is aligned."""
    copies, position = [], 0
    for move in sorted(moves, key=lambda move: -move.wire_dtype.itemsize):
        item = move.wire_dtype.itemsize
        packed = Region("", position // item, contiguous_strides(move.box.shape), move.wire_dtype)
        local = move.read if is_source else move.write
        sides = (buffers[local.local], local, 0, packed) if is_source else (0, packed, buffers[local.local], local)
        copies.append((move.tensor, Copy(move.box.shape, *sides)))
        position += move.num_bytes
    return copies


class _Clock:
    """Adds up the time spent under each name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"copy": 0.0, "checksum": 0.0, "total": 0.0}

    def time(self, name: str) -> AbstractContextManager[None]:
        return _Lap(self.seconds, name)


@dataclass(slots=True)
class _Lap:
    seconds: dict[str, float]
    name: str
    start: float = field(default=0.0)

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds[self.name] += time.perf_counter() - self.start


class Sender:
    """Serves one source rank's part of a plan.

    Args:
        source: Index into `plan.sources`.
        verify: Whether to take checksums.
    """

    def __init__(self, plan: Plan, source: int, transport: Transport, *, verify: bool = True) -> None:
        self._transport = transport
        self._verify = verify
        own = [(key, moves) for key, moves in plan.messages() if key[2] == source and moves[0].is_wire]
        own.sort(key=lambda item: (item[0][1], item[0][0]))
        self._messages = [(to, chunk, _Side(plan, moves, is_source=True)) for (to, chunk, _), moves in own]

    def run(self, tensors: Mapping[str, torch.Tensor], version: int, deadline_s: float) -> TransferReport:
        """Send everything once.

        Args:
            tensors: Local name -> contiguous tensor.
            version: Stamped on every message.

        Raises:
            ReshardError: When a destination fails or `deadline_s` passes.
        """
        clock, checksums, sizes = _Clock(), dict[PieceKey, int](), list[int]()

        def fill(side: _Side, buffer: torch.Tensor) -> None:
            sizes.append(buffer.nbytes)
            with clock.time("copy"):
                side.copy(tensors, buffer)
            if self._verify:
                with clock.time("checksum"):
                    side.checksum(tensors, checksums)

        with clock.time("total"):
            for to, chunk, side in self._messages:
                label = Label(version, chunk, side.num_bytes)
                self._transport.submit_send(to, label, lambda buffer, side=side: fill(side, buffer))  # type: ignore[misc]
            self._transport.run(deadline_s)
        return TransferReport(checksums, sum(sizes), clock.seconds)


class Receiver:
    """Carries out one destination rank's part of a plan.

    Args:
        destination: Index into `plan.destinations`.
        verify: Whether to take checksums.
    """

    def __init__(self, plan: Plan, destination: int, transport: Transport, *, verify: bool = True) -> None:
        self._transport = transport
        self._verify = verify
        self._chunks = plan.chunks[destination]
        self._messages: dict[int, list[tuple[int, _Side]]] = {chunk.index: [] for chunk in self._chunks}
        for (to, chunk, source), moves in plan.messages():
            if to == destination:
                if not moves[0].is_wire:
                    raise ReshardError(
                        f"{plan.destinations[to]}: {moves[0].tensor} lies on the same device at {plan.sources[source]}, "
                        "which this transport cannot read"
                    )
                self._messages[chunk].append((source, _Side(plan, moves, is_source=False)))

    def run(self, sink: ChunkSink, version: int, deadline_s: float) -> TransferReport:
        """Receive everything once, chunk by chunk.

        Raises:
            ReshardError: When a source fails, a message is not the expected one, or `deadline_s` passes.
        """
        clock, checksums, sizes = _Clock(), dict[PieceKey, int](), list[int]()
        deadline = time.monotonic() + deadline_s
        with clock.time("total"):
            for chunk in self._chunks:
                tensors = sink.open(chunk)

                def drain(side: _Side, buffer: torch.Tensor, tensors: Mapping[str, torch.Tensor] = tensors) -> None:
                    sizes.append(buffer.nbytes)
                    with clock.time("copy"):
                        side.copy(tensors, buffer)

                for source, side in self._messages[chunk.index]:
                    label = Label(version, chunk.index, side.num_bytes)
                    self._transport.submit_recv(source, label, lambda buffer, side=side: drain(side, buffer))  # type: ignore[misc]
                self._transport.run(deadline - time.monotonic())
                if self._verify:
                    with clock.time("checksum"):
                        for _, side in self._messages[chunk.index]:
                            side.checksum(tensors, checksums)
                sink.close(chunk)
        return TransferReport(checksums, sum(sizes), clock.seconds)


def compare_reports(plan: Plan, sources: Sequence[TransferReport], destinations: Sequence[TransferReport]) -> list[str]:
    """Return one line per piece on whose checksum the two sides disagree; empty when all agree.

    Args:
        sources: One report per source of the plan, in order.
        destinations: One report per destination, in order.
    """
    sent = {key: value for report in sources for key, value in report.checksums.items()}
    received = {key: value for report in destinations for key, value in report.checksums.items()}
    return [
        f"{key.tensor}: {plan.destinations[key.destination]} holds checksum {_hex(received.get(key))}, "
        f"{plan.sources[key.source]} sent {_hex(sent.get(key))}"
        for key in sorted(sent.keys() | received.keys())
        if sent.get(key) != received.get(key)
    ]


def _hex(value: int | None) -> str:
    return "nothing" if value is None else f"{value:016x}"
