"""Messages over a torch process group: what gloo and NCCL have in common.

A process group of its own on a store of its own, so that it neither meets nor blocks Megatron's and vLLM's groups. Ranks are
the plan's sources, then its destinations, which only receive. Buffers are made once: a source packs one message while the other is on its way, a
destination has the receipts of the next chunk posted while it unpacks this one. Each step has a tag of its own: a message that
is not expected is never put where another should be.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.errors import PeerLostError, ReshardError
from hybridrl.layout.shard import Place
from hybridrl.reshard.lost_peer import is_lost_peer
from hybridrl.reshard.transports import Endpoint, Fill, Label, Rendezvous, check_label
from hybridrl.reshard.transports.inbox import Inbox, inboxes, payload, read_header, write_header
from hybridrl.reshard.transports.meeting import Meeting
from hybridrl.reshard.transports.store import open_store

Allocate = Callable[[int], torch.Tensor]
Join = Callable[[dist.Store, int, int, timedelta], Any]  # torch declares no send and recv for its backends

_NUM_TAGS = 1 << 30
_NUM_SEND_BUFFERS = 2


class GroupTransport:
    """Transport over a process group; see :class:`hybridrl.reshard.transports.Transport`.

    Args:
        allocate: Makes a uint8 buffer of a number of bytes where the group can reach it.
        join: Makes the group of all ranks, which have met in the store; takes the time that it may take.

    Raises:
        PeerLostError: When a rank does not come or does not connect in time; names those that gave no sign.
        ReshardError: When relays are to be carried: a rank here either sends or receives. When this rank cannot connect.
    """

    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint, allocate: Allocate, join: Join) -> None:
        self._endpoint = endpoint
        self._me = endpoint.place
        self._inboxes = inboxes(endpoint)
        relays = [to for to, inbox in self._inboxes.items() if inbox.senders[-1:] >= (len(endpoint.plan.sources),)]
        if relays:
            raise ReshardError(
                f"{self._me}: {endpoint.plan.destinations[relays[0]]} takes weights from other destinations of its node, which "
                f"{type(self).__name__} does not carry; use mixed, or plan without is_shared"
            )
        self._memory = allocate(self._staging_bytes())
        self._sends: list[tuple[int, Label, Fill]] = []
        self._receipts: list[tuple[int, Label, Fill]] = []
        self._run = 0
        self._group: Any | None = self._connect(rendezvous, endpoint.sender, join)

    @property
    def staging_bytes(self) -> int:
        """Size of the send buffers, or of the inbox."""
        return self._memory.nbytes

    def submit_send(self, destination: int, label: Label, fill: Fill) -> None:
        """Queue a message for a destination."""
        self._sends.append((destination, label, fill))

    def submit_recv(self, sender: int, label: Label, drain: Fill) -> None:
        """Queue a receipt from a source."""
        self._receipts.append((sender, label, drain))

    def run(self, deadline_s: float) -> None:
        """Send and receive everything queued, in order."""
        deadline = time.monotonic() + deadline_s
        sends, self._sends = self._sends, []
        receipts, self._receipts = self._receipts, []
        self._send_all(sends, deadline)
        self._receive_all([list(group) for _, group in groupby(receipts, lambda r: r[1].chunk)], deadline)
        self._run += 1

    def close(self) -> None:
        """Close the connections; a waiting peer sees its connection end."""
        self._group = None

    def _connect(self, rendezvous: Rendezvous, rank: int, join: Join) -> Any:
        deadline = time.monotonic() + rendezvous.timeout_s
        num_ranks = len(self._endpoint.plan.senders)
        missing = [0] if rank else []  # it holds the store
        try:
            store = connect_store(rendezvous, is_master=rank == 0)
            meeting = Meeting(store, rank, num_ranks, deadline)
            if absent := meeting.meet():
                meeting.see_off(absent)
                came_late = rank in absent
                raise self._unconnected(rendezvous, absent, "this rank came late" if came_late else "they did not come")
            try:
                group = join(store, rank, num_ranks, meeting.time_to_join())
            except RuntimeError:
                missing = meeting.missing()
                meeting.see_off(missing)
                raise
            if absent := meeting.missing():
                meeting.see_off(absent)
                raise self._unconnected(rendezvous, absent, "they did not finish")
            return group
        except (OSError, RuntimeError) as e:
            raise self._unconnected(rendezvous, missing, e) from e

    def _unconnected(self, rendezvous: Rendezvous, missing: Sequence[int], reason: object) -> ReshardError:
        kind = PeerLostError if missing or (isinstance(reason, Exception) and is_lost_peer(reason)) else ReshardError
        names = ", ".join(str(self._place(rank)) for rank in missing) or "its peers"
        return kind(
            f"{self._me}: could not connect to {names} through {rendezvous.host}:{rendezvous.port} "
            f"within {rendezvous.timeout_s:g} s ({reason})"
        )

    def _send_all(self, sends: Sequence[tuple[int, Label, Fill]], deadline: float) -> None:
        buffers = self._memory.view(_NUM_SEND_BUFFERS, -1)
        in_flight: deque[tuple[int, dist.Work]] = deque()
        for number, (destination, label, fill) in enumerate(sends):
            peer = len(self._endpoint.plan.sources) + destination
            if len(in_flight) == _NUM_SEND_BUFFERS:
                self._finish(*in_flight.popleft(), deadline)
            inbox = self._inboxes[destination]
            slot = buffers[number % _NUM_SEND_BUFFERS][: inbox.sizes[label.chunk, self._endpoint.index]]
            write_header(slot, label)
            fill(payload(slot, label))
            with self._named(peer):
                tag = inbox.step(self._run, label.chunk) % _NUM_TAGS
                in_flight.append((peer, self._open().send([slot], peer, tag)))
        for peer, work in in_flight:
            self._finish(peer, work, deadline)

    def _receive_all(self, chunks: Sequence[Sequence[tuple[int, Label, Fill]]], deadline: float) -> None:
        posted = [self._post(chunk, 0) for chunk in chunks[:1]]
        for number, chunk in enumerate(chunks):
            posted += [self._post(following, (number + 1) % 2) for following in chunks[number + 1 : number + 2]]
            for (peer, label, drain), (slot, work) in zip(chunk, posted.pop(0), strict=True):
                self._finish(peer, work, deadline)
                check_label(read_header(slot), label, self._place(peer), self._me)
                drain(payload(slot, label))

    def _post(self, chunk: Sequence[tuple[int, Label, Fill]], half: int) -> list[tuple[torch.Tensor, dist.Work]]:
        """Start to receive a chunk into one half of the inbox."""
        inbox = self._inboxes[self._endpoint.index]
        posted = []
        for peer, label, _ in chunk:
            slot = inbox.slot(self._memory, half, label.chunk, peer)
            with self._named(peer):
                tag = inbox.step(self._run, label.chunk) % _NUM_TAGS
                posted.append((slot, self._open().recv([slot], peer, tag)))
        return posted

    def _finish(self, peer: int, work: dist.Work, deadline: float) -> None:
        with self._named(peer):
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def _staging_bytes(self) -> int:
        if not self._endpoint.is_source:
            return sum(2 * inbox.half_bytes for inbox in self._inboxes.values())
        return _NUM_SEND_BUFFERS * max((_largest(i, self._endpoint.index) for i in self._inboxes.values()), default=0)

    def _open(self) -> Any:
        if self._group is None:
            raise ReshardError(f"{self._me}: the transport is closed")
        return self._group

    def _place(self, peer: int) -> Place:
        return self._endpoint.plan.senders[peer]

    def _named(self, peer: int) -> NamedErrors:
        return NamedErrors(self._me, self._place(peer))


def connect_store(rendezvous: Rendezvous, *, is_master: bool) -> dist.Store:
    """Open the store of one session; the master holds it."""
    timeout = timedelta(seconds=rendezvous.timeout_s)
    store = open_store(rendezvous.host, rendezvous.port, is_master=is_master, timeout=timeout)
    return dist.PrefixStore(rendezvous.session, store)


def _largest(inbox: Inbox, source: int) -> int:
    size = max(num_bytes for (_, sender), num_bytes in inbox.sizes.items() if sender == source)
    return -(-size // 64) * 64


class NamedErrors:
    """Turns a failed operation into an error that names both ranks."""

    def __init__(self, me: Place, peer: Place) -> None:
        self._me, self._peer = me, peer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            kind_of_error = PeerLostError if is_lost_peer(error) else ReshardError
            raise kind_of_error(f"{self._me}: transfer with {self._peer} failed ({error})") from error
