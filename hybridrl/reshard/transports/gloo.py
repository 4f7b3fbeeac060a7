"""Gloo over TCP: CPU ranks on any hosts.

A process group of its own on a store of its own, so that it neither meets nor blocks Megatron's and vLLM's groups. Ranks are
the plan's sources, then its destinations.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hybridrl.errors import ReshardError
from hybridrl.layout.shard import Place
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.transports import Fill, Label, Rendezvous, check_label, find_peers
from hybridrl.reshard.transports.store import address_towards, gloo_group, open_store

_LABEL_TAG, _DATA_TAG = 1, 2
_MAX_IN_FLIGHT = 2


class GlooTransport:
    """Gloo transport; see :class:`hybridrl.reshard.transports.Transport`."""

    def __init__(self, rendezvous: Rendezvous, plan: Plan, *, source: int | None, destination: int | None) -> None:
        self._found = find_peers(plan, source, destination)
        self._me = self._found.me
        self._is_source = source is not None
        self._first_peer = len(plan.sources) if self._is_source else 0
        self._sends: list[tuple[int, Label, Fill]] = []
        self._receipts: list[tuple[int, Label, Fill]] = []
        rank = source if source is not None else len(plan.sources) + (destination or 0)
        world_size = len(plan.sources) + len(plan.destinations)
        timeout = timedelta(seconds=rendezvous.timeout_s)
        try:
            tcp = open_store(rendezvous.host, rendezvous.port, is_master=rank == 0, timeout=timeout)
            self._store = dist.PrefixStore(rendezvous.session, tcp)
            own = address_towards(rendezvous.host, rendezvous.port)
            self._group = gloo_group(self._store, rank, world_size, own, timeout)
        except (OSError, RuntimeError, dist.DistError) as e:
            raise ReshardError(
                f"{self._me}: could not connect to {world_size - 1} peers through {rendezvous.host}:{rendezvous.port} "
                f"within {rendezvous.timeout_s:g} s ({e})"
            ) from e

    def submit_send(self, peer: int, label: Label, fill: Fill) -> None:
        """Queue a message for a destination."""
        self._sends.append((peer, label, fill))

    def submit_recv(self, peer: int, label: Label, drain: Fill) -> None:
        """Queue a receipt from a source."""
        self._receipts.append((peer, label, drain))

    def run(self, deadline_s: float) -> None:
        """Send and receive everything queued, in order, with a bounded number of messages in flight."""
        deadline = time.monotonic() + deadline_s
        sends, self._sends = self._sends, []
        receipts, self._receipts = self._receipts, []
        self._send_all(sends, deadline)
        for peer, label, drain in receipts:
            self._receive(peer, label, drain, deadline)

    def close(self) -> None:
        """Close the connections; a waiting peer sees its connection end."""
        del self._group
        del self._store

    def _send_all(self, sends: list[tuple[int, Label, Fill]], deadline: float) -> None:
        in_flight: list[tuple[int, list[dist.Work], tuple[torch.Tensor, ...]]] = []
        for peer, label, fill in sends:
            if len(in_flight) == _MAX_IN_FLIGHT:
                self._finish(*in_flight.pop(0)[:2], deadline)
            head = torch.tensor([label.version, label.chunk, label.num_bytes], dtype=torch.int64)
            data = torch.empty(label.num_bytes, dtype=torch.uint8)
            fill(data)
            rank = self._first_peer + peer
            with self._named(self._place(peer)):
                works = [self._group.send([head], rank, _LABEL_TAG), self._group.send([data], rank, _DATA_TAG)]  # type: ignore[attr-defined]
            in_flight.append((peer, works, (head, data)))
        for peer, works, _ in in_flight:
            self._finish(peer, works, deadline)

    def _receive(self, peer: int, label: Label, drain: Fill, deadline: float) -> None:
        head = torch.empty(3, dtype=torch.int64)
        data = torch.empty(label.num_bytes, dtype=torch.uint8)
        rank = self._first_peer + peer
        with self._named(self._place(peer)):
            self._finish(peer, [self._group.recv([head], rank, _LABEL_TAG)], deadline)  # type: ignore[attr-defined]
            check_label(Label(*head.tolist()), label, self._place(peer), self._me)
            self._finish(peer, [self._group.recv([data], rank, _DATA_TAG)], deadline)  # type: ignore[attr-defined]
        drain(data)

    def _finish(self, peer: int, works: list[dist.Work], deadline: float) -> None:
        with self._named(self._place(peer)):
            for work in works:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def _place(self, peer: int) -> Place:
        return self._found.places[peer]

    def _named(self, peer: Place) -> _NamedErrors:
        return _NamedErrors(self._me, peer)


class _NamedErrors:
    """Turns a failed gloo operation into an error that names both ranks."""

    def __init__(self, me: Place, peer: Place) -> None:
        self._me, self._peer = me, peer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise ReshardError(f"{self._me}: transfer with {self._peer} failed or timed out ({error})") from error
