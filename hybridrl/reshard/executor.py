"""Executes one rank's part of a plan: pack -> transport -> unpack, with a canonical checksum on each side.

Compiled once per connection into kernel tables; a run only binds addresses. A source packs each message straight into the
transport's buffer; a destination goes chunk by chunk, so that it never holds more than two chunks of staging, and its
:class:`ChunkSink` decides what "write" means (vLLM materialises a module at a time). It relays a chunk from its open tensors, after what sources sent of it and before it closes the chunk:
a relay is a message like any other, whose source side is a destination. The checksums are taken from the
source's own tensors and from the destination's own tensors, never from the message, so packing, transport and unpacking
are all inside what is verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol

import torch

from hybridrl.reshard.clock import Clock
from hybridrl.reshard.message import LocalMoves, MessageEnd, Staging, Tensors
from hybridrl.reshard.ops import Side
from hybridrl.reshard.plan import Chunk, Ends, Plan
from hybridrl.reshard.transports import Label, Transport


@dataclass(frozen=True, slots=True, order=True)
class PieceKey:
    """What a checksum speaks of: all moves of one tensor from an index into ``plan.senders`` to one into ``plan.destinations``."""

    tensor: str
    sender: int
    destination: int


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What one rank did in one transfer.

    Attributes:
        checksums: Canonical checksum of each piece that a source sent or a destination received; empty when verification is
            off.
        wire_bytes: Payload that a source put on or a destination took off the wire, counted from the messages themselves.
        seconds: Time in "copy", "checksum" and "total"; a checksum that is taken along with a copy counts as copy.
        staging_bytes: Most memory that this rank held beside its tensors: messages in the transport and on the device.
        network_bytes: Of `wire_bytes`, what went from node to node.
        relayed: Canonical checksum of each piece that a destination passed on.
    """

    checksums: Mapping[PieceKey, int]
    wire_bytes: int
    seconds: Mapping[str, float]
    staging_bytes: int = 0
    network_bytes: int = 0
    relayed: Mapping[PieceKey, int] = field(default_factory=dict)


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


class Sender:
    """Serves one source rank's part of a plan.

    Args:
        source: Index into `plan.sources`.
        verify: Whether to take checksums.
        local: Destinations in this process, which copy from its tensors themselves (see :class:`Receiver`).
    """

    def __init__(
        self, plan: Plan, source: int, transport: Transport, *, verify: bool = True, local: Collection[int] = ()
    ) -> None:
        self._plan = plan
        self._transport = transport
        self._source = source
        self._staging = Staging()
        self._messages: list[tuple[int, int, MessageEnd]] = []
        self._local: list[tuple[int, LocalMoves]] = []
        own = plan.where(plan.sent.source == source)
        for chunk, to, moves in sorted((chunk, to, moves) for (to, chunk, _), moves in own):
            if to not in local:
                end = MessageEnd(moves, plan.canonical, Side.SOURCE, verify=verify, staging=self._staging)
                self._messages.append((to, chunk, end))
            elif verify:
                self._local.append((to, LocalMoves(moves, plan.canonical, Side.SOURCE, verify=True)))

    def run(self, tensors: Tensors, version: int, deadline_s: float) -> TransferReport:
        """Send everything once.

        Args:
            tensors: Local name -> contiguous tensor.
            version: Stamped on every message.

        Raises:
            ReshardError: When a destination fails or `deadline_s` passes.
        """
        clock, checksums, sizes = Clock(), _Checksums(), _Sizes()

        def fill(to: int, end: MessageEnd, buffer: torch.Tensor) -> None:
            sizes.add(buffer.nbytes, is_wire=end.is_wire, is_near=self._plan.is_near(self._source, to))
            checksums.add(self._source, to, end.run(tensors, buffer, clock))

        with clock.time("total"):
            for to, chunk, end in self._messages:
                self._transport.submit_send(to, Label(version, chunk, end.num_bytes), partial(fill, to, end))
            self._transport.run(deadline_s)
            for to, moves in self._local:
                checksums.add(self._source, to, moves.checksum(tensors, clock))
        return TransferReport(
            checksums.of_piece,
            sizes.wire,
            clock.seconds,
            self._transport.staging_bytes + self._staging.num_bytes,
            sizes.network,
        )


class Receiver:
    """Carries out one destination rank's part of a plan.

    Args:
        destination: Index into `plan.destinations`.
        verify: Whether to take checksums.
        held: Tensors of sources in this process, by index; read at every run. What they have on the same device is copied
            straight from them, without a message.
    """

    def __init__(
        self,
        plan: Plan,
        destination: int,
        transport: Transport,
        *,
        verify: bool = True,
        held: Mapping[int, Tensors] | None = None,
    ) -> None:
        self._plan = plan
        self._transport = transport
        self._destination = destination
        self._sender = len(plan.sources) + destination
        self._held = held or {}
        self._staging = Staging()
        self._chunks = plan.chunks[destination]
        self._messages: dict[int, list[tuple[int, MessageEnd]]] = {chunk.index: [] for chunk in self._chunks}
        self._local: dict[int, list[tuple[int, LocalMoves]]] = {chunk.index: [] for chunk in self._chunks}
        for (_, chunk, sender), moves in plan.where(plan.sent.destination == destination):
            if sender in self._held:
                local = LocalMoves(moves, plan.canonical, Side.DESTINATION, verify=verify)
                self._local[chunk].append((sender, local))
            else:
                end = MessageEnd(moves, plan.canonical, Side.DESTINATION, verify=verify, staging=self._staging)
                self._messages[chunk].append((sender, end))
        self._relays: list[tuple[int, int, MessageEnd]] = []
        for (to, chunk, _), moves in plan.where(plan.sent.source == self._sender):
            end = MessageEnd(moves, plan.canonical, Side.SOURCE, verify=verify, staging=self._staging)
            self._relays.append((chunk, to, end))
        self._relays.sort(key=lambda relay: relay[:2])

    def run(self, sink: ChunkSink, version: int, deadline_s: float) -> TransferReport:
        """Receive everything once, chunk by chunk.

        Raises:
            ReshardError: When a source fails, a message is not the expected one, or `deadline_s` passes.
        """
        clock, checksums, relayed, sizes = Clock(), _Checksums(), _Checksums(), _Sizes()
        num_messages = Counter({chunk: len(found) for chunk, found in self._messages.items()})
        num_messages.update(chunk for chunk, _, _ in self._relays)
        progress = _Progress(self._chunks, sink, num_messages)

        def copy_local(chunk: int, tensors: Tensors) -> None:
            for source, moves in self._local[chunk]:
                checksums.add(source, self._destination, moves.run(self._held[source], tensors, clock))

        def drain(sender: int, chunk: int, end: MessageEnd, buffer: torch.Tensor) -> None:
            sizes.add(buffer.nbytes, is_wire=end.is_wire, is_near=self._plan.is_near(sender, self._destination))
            checksums.add(sender, self._destination, end.run(progress.tensors, buffer, clock))
            progress.message_done(chunk, copy_local)

        def pass_on(to: int, chunk: int, end: MessageEnd, buffer: torch.Tensor) -> None:
            relayed.add(self._sender, to, end.run(progress.tensors, buffer, clock))
            progress.message_done(chunk, copy_local)

        with clock.time("total"):
            progress.start(copy_local)
            for chunk, messages in self._messages.items():
                for sender, end in messages:
                    label = Label(version, chunk, end.num_bytes)
                    self._transport.submit_recv(sender, label, partial(drain, sender, chunk, end))
            for chunk, to, end in self._relays:
                self._transport.submit_send(to, Label(version, chunk, end.num_bytes), partial(pass_on, to, chunk, end))
            self._transport.run(deadline_s)
        return TransferReport(
            checksums.of_piece,
            sizes.wire,
            clock.seconds,
            self._transport.staging_bytes + self._staging.num_bytes,
            sizes.network,
            relayed.of_piece,
        )


class _Sizes:
    """Adds up the bytes of messages."""

    def __init__(self) -> None:
        self.wire = self.network = 0

    def add(self, num_bytes: int, *, is_wire: bool, is_near: bool) -> None:
        self.wire += num_bytes if is_wire else 0
        self.network += 0 if is_near else num_bytes


class _Checksums:
    """Adds up the pieces' checksums."""

    def __init__(self) -> None:
        self.of_piece: dict[PieceKey, int] = {}

    def add(self, sender: int, destination: int, sums: Mapping[str, int]) -> None:
        for tensor, value in sums.items():
            key = PieceKey(tensor, sender, destination)
            self.of_piece[key] = (self.of_piece.get(key, 0) + value) % 2**64


class _Progress:
    """Opens and closes the chunks in order; one is open at a time.

    Args:
        num_messages: Of each chunk, received or passed on.
    """

    def __init__(self, chunks: Sequence[Chunk], sink: ChunkSink, num_messages: Counter[int]) -> None:
        self._chunks = iter(chunks)
        self._sink = sink
        self._num_messages = num_messages
        self._open: Chunk | None = None
        self.tensors: Tensors = {}

    def start(self, copy_local: Callable[[int, Tensors], None]) -> None:
        """Open the next chunk that waits for a message, and complete those before it."""
        for chunk in self._chunks:
            self._open, self.tensors = chunk, self._sink.open(chunk)
            copy_local(chunk.index, self.tensors)
            if self._num_messages[chunk.index]:
                return
            self._sink.close(chunk)

    def message_done(self, chunk: int, copy_local: Callable[[int, Tensors], None]) -> None:
        """Take note of a message of the open chunk; close it after its last one."""
        assert self._open is not None and self._open.index == chunk, (self._open, chunk)
        self._num_messages[chunk] -= 1
        if not self._num_messages[chunk]:
            self._sink.close(self._open)
            self.start(copy_local)


def compare_reports(plan: Ends, sources: Sequence[TransferReport], destinations: Sequence[TransferReport]) -> list[str]:
    """Return one line per piece on whose checksum the two sides disagree; empty when all agree.

    Args:
        sources: One report per source of the plan, in order.
        destinations: One report per destination, in order.
    """
    passed_on = [report.relayed for report in destinations]
    sent = dict(chain.from_iterable(sums.items() for sums in (*(r.checksums for r in sources), *passed_on)))
    received = {key: value for report in destinations for key, value in report.checksums.items()}
    return [
        f"{key.tensor}: {plan.destinations[key.destination]} holds checksum {_hex(received.get(key))}, "
        f"{plan.senders[key.sender]} sent {_hex(sent.get(key))}"
        for key in sorted(sent.keys() | received.keys())
        if sent.get(key) != received.get(key)
    ]


def _hex(value: int | None) -> str:
    return "nothing" if value is None else f"{value:016x}"
