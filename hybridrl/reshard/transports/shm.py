"""Shared memory between ranks of one host: the source packs straight into memory that the destination reads.

One file in ``/dev/shm`` per pair of ranks, with a header page and two slots, so that a destination unpacks one chunk while
the source packs the next. The file is created and touched by the source, mapped by both, and unlinked as soon as both hold
it, so nothing stays behind whatever dies. Each counter has one writer, which publishes it after the data it guards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridrl.errors import ReshardError
from hybridrl.layout.shard import Place
from hybridrl.reshard import ops
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.transports import SHARED_MEMORY, Fill, Label, Rendezvous, check_label, find_peers

_NUM_SLOTS = 2
_HEADER_BYTES = 4096
_WRITTEN, _CONSUMED, _OPENED, _CLOSED, _LABELS = 0, 8, 16, 24, 32
_POLL_S = 50e-6


class _Channel:
    """The mapped file of one (source, destination) pair."""

    def __init__(self, path: Path, slot_bytes: int) -> None:
        self.path = path
        self.slot_bytes = slot_bytes
        size = _HEADER_BYTES + _NUM_SLOTS * slot_bytes
        self.memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        self.words = self.memory[:_HEADER_BYTES].view(torch.int64)

    def get(self, word: int) -> int:
        return ops.load_acquire(self.words.data_ptr() + 8 * word)

    def set(self, word: int, value: int) -> None:
        ops.store_release(self.words.data_ptr() + 8 * word, value)

    def slot(self, message: int, num_bytes: int) -> torch.Tensor:
        start = _HEADER_BYTES + message % _NUM_SLOTS * self.slot_bytes
        return self.memory[start : start + num_bytes]

    def write_label(self, message: int, label: Label) -> None:
        at = _LABELS + message % _NUM_SLOTS * 8
        self.words[at : at + 3] = torch.tensor([label.version, label.chunk, label.num_bytes])

    def read_label(self, message: int) -> Label:
        at = _LABELS + message % _NUM_SLOTS * 8
        return Label(*self.words[at : at + 3].tolist())


@dataclass(slots=True)
class _Peer:
    place: Place
    channel: _Channel
    queue: list[tuple[Label, Fill]]
    message: int = 0


class ShmTransport:
    """Shared-memory transport; see :class:`hybridrl.reshard.transports.Transport`."""

    def __init__(self, rendezvous: Rendezvous, plan: Plan, *, source: int | None, destination: int | None) -> None:
        found = find_peers(plan, source, destination)
        self._me = found.me
        self._is_source = source is not None
        self._order: list[int] = []
        self._peers: dict[int, _Peer] = {}
        deadline = time.monotonic() + rendezvous.timeout_s
        for peer, max_bytes in found.max_bytes.items():
            pair = (source, peer) if source is not None else (peer, destination)
            path = SHARED_MEMORY / f"hybridrl-{rendezvous.session}-{pair[0]}-{pair[1]}"
            slot_bytes = -(-max_bytes // _HEADER_BYTES) * _HEADER_BYTES
            channel = self._create(path, slot_bytes) if self._is_source else self._attach(path, slot_bytes, deadline)
            self._peers[peer] = _Peer(found.places[peer], channel, [])
        if self._is_source:
            self._await_destinations(deadline)

    def submit_send(self, peer: int, label: Label, fill: Fill) -> None:
        """Queue a message for a destination."""
        self._peers[peer].queue.append((label, fill))

    def submit_recv(self, peer: int, label: Label, drain: Fill) -> None:
        """Queue a receipt from a source."""
        self._peers[peer].queue.append((label, drain))

    def run(self, deadline_s: float) -> None:
        """Carry out the queues of all peers, whichever is ready first."""
        deadline = time.monotonic() + deadline_s
        step = self._send_next if self._is_source else self._receive_next
        while pending := [peer for peer in self._peers.values() if peer.queue]:
            num_done = sum(step(peer) for peer in pending)
            if not num_done:
                self._check(pending, deadline)
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Tell the peers and unmap."""
        for peer in self._peers.values():
            peer.channel.set(_CLOSED, 1)
            peer.channel.path.unlink(missing_ok=True)
        self._peers.clear()

    def _send_next(self, peer: _Peer) -> bool:
        if peer.message - peer.channel.get(_CONSUMED) >= _NUM_SLOTS:
            return False
        label, fill = peer.queue.pop(0)
        fill(peer.channel.slot(peer.message, label.num_bytes))
        peer.channel.write_label(peer.message, label)
        peer.message += 1
        peer.channel.set(_WRITTEN, peer.message)
        return True

    def _receive_next(self, peer: _Peer) -> bool:
        if peer.channel.get(_WRITTEN) <= peer.message:
            return False
        label, drain = peer.queue.pop(0)
        check_label(peer.channel.read_label(peer.message), label, peer.place, self._me)
        drain(peer.channel.slot(peer.message, label.num_bytes))
        peer.message += 1
        peer.channel.set(_CONSUMED, peer.message)
        return True

    def _check(self, pending: list[_Peer], deadline: float) -> None:
        for peer in pending:
            if peer.channel.get(_CLOSED):
                raise ReshardError(f"{self._me}: {peer.place} closed its side of the weight sync; see its own error")
        if time.monotonic() > deadline:
            label = pending[0].queue[0][0]
            doing = "reads" if self._is_source else "sends"
            raise ReshardError(
                f"{self._me}: timed out until {pending[0].place} {doing} chunk {label.chunk} of version {label.version}"
            )

    def _create(self, path: Path, slot_bytes: int) -> _Channel:
        building = path.with_suffix(".new")
        size = _HEADER_BYTES + _NUM_SLOTS * slot_bytes
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
        return _Channel(path, slot_bytes)

    def _attach(self, path: Path, slot_bytes: int, deadline: float) -> _Channel:
        _wait(path.exists, deadline, f"{self._me}: the source did not create {path} in time")
        channel = _Channel(path, slot_bytes)
        channel.set(_OPENED, 1)
        return channel

    def _await_destinations(self, deadline: float) -> None:
        for peer in self._peers.values():
            opened = peer.channel.get
            _wait(lambda get=opened: bool(get(_OPENED)), deadline, f"{self._me}: {peer.place} did not attach in time")  # type: ignore[misc]
            peer.channel.path.unlink(missing_ok=True)


def _wait(ready: Callable[[], bool], deadline: float, message: str) -> None:
    while not ready():
        if time.monotonic() > deadline:
            raise ReshardError(message)
        time.sleep(1e-3)
