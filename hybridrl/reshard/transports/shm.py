"""Shared memory between ranks of one host: the source packs straight into memory that the destination reads.

One file in ``/dev/shm`` per destination: a control page, then its inbox. The destination creates it, those that send to it map it,
and it is unlinked as soon as all hold it, so nothing stays behind whatever dies. Each counter has one writer, which publishes it after the
data it guards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hybridrl.errors import PeerLostError, ReshardError
from hybridrl.layout.shard import Place
from hybridrl.reshard import ops
from hybridrl.reshard.transports import SHARED_MEMORY, Endpoint, Fill, Label, Rendezvous, check_label
from hybridrl.reshard.transports.inbox import Inbox, inboxes, payload, read_header, write_header

_PAGE_BYTES = 4096
_LINE_WORDS = 8  # each rank's counters have a cache line of their own
_WRITTEN, _OPENED, _CLOSED = 0, 1, 2  # of a sender; a destination has _CONSUMED in place of _WRITTEN
_CONSUMED = 0
_POLL_S = 50e-6


class _Mailbox:
    """The mapped file of one destination."""

    def __init__(self, path: Path, inbox: Inbox, halves: torch.Tensor | None) -> None:
        self.path = path
        self.inbox = inbox
        self._lines = {sender: _LINE_WORDS * (1 + i) for i, sender in enumerate(inbox.senders)}
        control = control_bytes(inbox)
        size = control + (2 * inbox.half_bytes if halves is None else 0)
        # Through a descriptor: opening by name would create a file that its owner has just given up.
        descriptor = os.open(path, os.O_RDWR)
        try:
            memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self._words = memory[:control].view(torch.int64)
        self.halves = _pinned(memory[control:]) if halves is None else halves

    def get(self, word: int, sender: int | None = None) -> int:
        """Read a counter of a sender, or of the destination."""
        return ops.load_acquire(self._address(word, sender))

    def set(self, word: int, value: int, sender: int | None = None) -> None:
        """Publish a counter."""
        ops.store_release(self._address(word, sender), value)

    def release(self) -> None:
        """Give pinned memory back to the operating system."""
        if torch.cuda.is_available() and not self.halves.is_cuda:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.halves.data_ptr()))

    def _address(self, word: int, sender: int | None) -> int:
        line = 0 if sender is None else self._lines[sender]
        return self._words.data_ptr() + 8 * (line + word)


@dataclass(slots=True)
class _Outgoing:
    """A sender's view of one destination."""

    place: Place
    mailbox: _Mailbox
    queue: list[tuple[Label, Fill]] = field(default_factory=list)

    def waits(self, last_chunk: int | None) -> bool:
        """Whether something up to a chunk is queued."""
        return bool(self.queue) and (last_chunk is None or self.queue[0][0].chunk <= last_chunk)


class ShmTransport:
    """Shared-memory transport; see :class:`hybridrl.reshard.transports.Transport`."""

    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._me = endpoint.place
        self._run = 0
        self._peers: dict[int, _Outgoing] = {}
        self._mailbox: _Mailbox | None = None
        self._receipts: list[tuple[int, Label, Fill]] = []
        deadline = time.monotonic() + rendezvous.timeout_s
        found = inboxes(endpoint)
        paths = {destination: SHARED_MEMORY / f"hybridrl-{rendezvous.session}-{destination}" for destination in found}
        if not endpoint.is_source and endpoint.index in found:
            own = endpoint.index
            self._mailbox = self._create(paths.pop(own), found[own])
        try:
            for destination, path in paths.items():
                place = endpoint.plan.destinations[destination]
                box = self._attach(path, destination, found[destination], deadline)
                self._peers[destination] = _Outgoing(place, box)
            if self._mailbox:
                self._await_senders(self._mailbox, deadline)
        finally:
            if self._mailbox:
                self._mailbox.path.unlink(missing_ok=True)

    @property
    def staging_bytes(self) -> int:
        """Size of this rank's own inbox; who only sends has no memory of its own."""
        return self._mailbox.halves.nbytes if self._mailbox else 0

    def submit_send(self, destination: int, label: Label, fill: Fill) -> None:
        """Queue a message for a destination."""
        self._peers[destination].queue.append((label, fill))

    def submit_recv(self, sender: int, label: Label, drain: Fill) -> None:
        """Queue a receipt."""
        self._receipts.append((sender, label, drain))

    def run(self, deadline_s: float) -> None:
        """Carry out the queues: a source serves whoever has room, a destination goes chunk after chunk."""
        deadline = time.monotonic() + deadline_s
        receipts, self._receipts = self._receipts, []
        if self._endpoint.is_source:
            self._send(deadline)
        else:
            sends = {label.chunk for peer in self._peers.values() for label, _ in peer.queue}
            for chunk in sorted(sends | {label.chunk for _, label, _ in receipts}):
                self._pass_chunk(chunk, [receipt for receipt in receipts if receipt[1].chunk == chunk], deadline)
        self._run += 1

    def close(self) -> None:
        """Tell the peers and unmap."""
        for peer in self._peers.values():
            peer.mailbox.set(_CLOSED, 1, self._endpoint.sender)
            peer.mailbox.release()
        if self._mailbox:
            self._mailbox.set(_CLOSED, 1)
            self._mailbox.release()
        self._peers.clear()
        self._mailbox = None

    def _send(self, deadline: float, last_chunk: int | None = None) -> None:
        """Send what is queued, up to a chunk, to whoever has room."""
        while pending := [peer for peer in self._peers.values() if peer.waits(last_chunk)]:
            if not sum(self._send_next(peer) for peer in pending):
                label = pending[0].queue[0][0]
                self._rest(deadline, f"{pending[0].place} reads chunk {label.chunk} of version {label.version}")

    def _send_next(self, peer: _Outgoing) -> bool:
        label, fill = peer.queue[0]
        box, me = peer.mailbox, self._endpoint.sender
        is_closed = box.get(_CLOSED)
        step = box.inbox.step(self._run, label.chunk)
        if box.get(_CONSUMED) < step - 1:
            self._check_open(bool(is_closed), peer.place)
            return False
        slot = box.inbox.slot(box.halves, step % 2, label.chunk, me)
        fill(payload(slot, label))
        write_header(slot, label)
        self._flush()
        box.set(_WRITTEN, step + 1, me)
        peer.queue.pop(0)
        return True

    def _pass_chunk(self, chunk: int, receipts: list[tuple[int, Label, Fill]], deadline: float) -> None:
        """Take one chunk from sources, pass on what others want of it, and take what they pass on."""
        num_sources, box = len(self._endpoint.plan.sources), self._mailbox
        step = box.inbox.step(self._run, chunk) if box and receipts else 0
        if box and receipts:
            box.set(_CONSUMED, step)  # earlier steps may have had no message for this process
            self._receive_all(box, [receipt for receipt in receipts if receipt[0] < num_sources], deadline)
        self._send(deadline, last_chunk=chunk)
        if box and receipts:
            self._receive_all(box, [receipt for receipt in receipts if receipt[0] >= num_sources], deadline)
            self._flush()
            box.set(_CONSUMED, step + 1)

    def _receive_all(self, box: _Mailbox, waiting: list[tuple[int, Label, Fill]], deadline: float) -> None:
        while waiting:
            late = [receipt for receipt in waiting if not self._receive(box, *receipt)]
            if len(late) == len(waiting):
                sender, label, _ = late[0]
                peer = self._endpoint.plan.senders[sender]
                self._rest(deadline, f"{peer} sends chunk {label.chunk} of version {label.version}")
            waiting = late

    def _receive(self, box: _Mailbox, sender: int, label: Label, drain: Fill) -> bool:
        is_closed, peer = box.get(_CLOSED, sender), self._endpoint.plan.senders[sender]
        step = box.inbox.step(self._run, label.chunk)
        if box.get(_WRITTEN, sender) <= step:
            self._check_open(bool(is_closed), peer)
            return False
        slot = box.inbox.slot(box.halves, step % 2, label.chunk, sender)
        check_label(read_header(slot), label, peer, self._me)
        drain(payload(slot, label))
        return True

    def _rest(self, deadline: float, until: str) -> None:
        """Wait for a peer, within bounds."""
        if time.monotonic() > deadline:
            raise PeerLostError(f"{self._me}: timed out until {until}")
        time.sleep(_POLL_S)

    def _halves(self, destination: int, inbox: Inbox) -> torch.Tensor | None:
        """Return the inbox of a destination where it is not in the file."""
        return None

    def _flush(self) -> None:
        """Wait for what must be done before a counter may say so."""

    def _check_open(self, is_closed: bool, peer: Place) -> None:
        if is_closed:
            raise PeerLostError(f"{self._me}: {peer} closed its side of the weight sync; see its own error")

    def _create(self, path: Path, inbox: Inbox) -> _Mailbox:
        halves = self._halves(self._endpoint.index, inbox)
        building, size = (
            path.with_suffix(".new"),
            control_bytes(inbox) + (2 * inbox.half_bytes if halves is None else 0),
        )
        descriptor = os.open(building, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as e:
            building.unlink()
            raise ReshardError(
                f"{self._me}: no {size} bytes of shared memory in {SHARED_MEMORY} ({e.strerror}); "
                "enlarge it (docker --shm-size) or lower weight_sync.chunk_mib"
            ) from e
        finally:
            os.close(descriptor)
        building.rename(path)
        return _Mailbox(path, inbox, halves)

    def _await_senders(self, box: _Mailbox, deadline: float) -> None:
        for sender in box.inbox.senders:
            text = f"{self._me}: {self._endpoint.plan.senders[sender]} did not attach in time"
            _wait(lambda sender=sender: bool(box.get(_OPENED, sender)), deadline, text)  # type: ignore[misc]

    def _attach(self, path: Path, destination: int, inbox: Inbox, deadline: float) -> _Mailbox:
        place = self._endpoint.plan.destinations[destination]
        _wait(path.exists, deadline, f"{self._me}: {place} did not attach in time, {path} does not exist")
        try:
            box = _Mailbox(path, inbox, self._halves(destination, inbox))
        except FileNotFoundError as e:
            raise PeerLostError(f"{self._me}: {place} gave up while this rank attached") from e
        box.set(_OPENED, 1, self._endpoint.sender)
        return box


def control_bytes(inbox: Inbox) -> int:
    """Return the size of the pages with the counters: a line for the destination, and one per sender."""
    return -(-8 * _LINE_WORDS * (1 + len(inbox.senders)) // _PAGE_BYTES) * _PAGE_BYTES


def _pinned(memory: torch.Tensor) -> torch.Tensor:
    """Let devices read and write the memory directly, where there are any."""
    if torch.cuda.is_available():
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    return memory


def _wait(ready: Callable[[], bool], deadline: float, message: str) -> None:
    while not ready():
        if time.monotonic() > deadline:
            raise PeerLostError(message)
        time.sleep(1e-3)
