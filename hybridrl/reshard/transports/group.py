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
from contextlib import suppress
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
from hybridrl.reshard.transports.store import open_store

Allocate = Callable[[int], torch.Tensor]
Join = Callable[[dist.Store, int, int, timedelta], Any]  # torch declares no send and recv for its backends

_NUM_TAGS = 1 << 30
_NUM_SEND_BUFFERS = 2
_MEET_SHARE, _JOIN_SHARE, _REPORT_SHARE = 0.5, 0.75, 0.875  # of the bound on connecting, by when each step ends


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
        """Meet all ranks, join them, and say that this is done; who does not say so within the time is lost."""
        start, places = time.monotonic(), self._endpoint.plan.senders
        missing = [str(place) for place in places[:1] if rank != 0]  # the first holds the store

        def until(share: float) -> timedelta:
            return timedelta(seconds=max(0.001, start + share * rendezvous.timeout_s - time.monotonic()))

        try:
            store = connect_store(rendezvous, is_master=rank == 0)
            try:
                store.set(f"here-{rank}", "")
                store.wait([f"here-{i}" for i in range(len(places))], until(_MEET_SHARE))
                group = join(store, rank, len(places), until(_JOIN_SHARE))
                store.set(f"ended-{rank}", "")
                return group
            except RuntimeError:
                store.set(f"ended-{rank}", "")
                # The store ends with the first rank: it is the last to go, so that the others find out who is missing.
                missing = self._missing(store, until(_REPORT_SHARE if rank else 1.0))
                raise
        except (OSError, RuntimeError) as e:
            kind = PeerLostError if missing or is_lost_peer(e) else ReshardError
            raise kind(
                f"{self._me}: could not connect to {', '.join(missing) or 'its peers'} through {rendezvous.host}:"
                f"{rendezvous.port} within {rendezvous.timeout_s:g} s ({e})"
            ) from e

    def _missing(self, store: dist.Store, timeout: timedelta) -> list[str]:
        """Return the ranks that have neither joined nor failed to, once the time is up."""
        ended = [f"ended-{i}" for i in range(len(self._endpoint.plan.senders))]
        with suppress(RuntimeError):
            store.wait(ended, timeout)
        return [str(self._place(i)) for i, key in enumerate(ended) if not store.check([key])]

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
