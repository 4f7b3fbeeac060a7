"""How bytes travel between the ranks of a plan.

A transport connects one rank with its peers on the other side. Messages between two ranks keep their order. Every wait is
bounded; a peer that fails or falls silent becomes a :class:`ReshardError` that names both ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from hybridrl.errors import ReshardError
from hybridrl.layout.shard import Place
from hybridrl.reshard.plan import Plan

Fill = Callable[[torch.Tensor], None]

SHARED_MEMORY = Path("/dev/shm")
"""Where the files of the shm transport lie, named ``hybridrl-<session>-<source>-<destination>``."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a message is, checked on arrival so that a stale or lost one is never taken for another."""

    version: int
    chunk: int
    num_bytes: int


class Transport(Protocol):
    """One rank's connections to the ranks of the other side; peers are indices into the plan."""

    def submit_send(self, peer: int, label: Label, fill: Fill) -> None:
        """Queue a message; `fill` packs it into a uint8 buffer of `label.num_bytes` once there is room."""
        ...

    def submit_recv(self, peer: int, label: Label, drain: Fill) -> None:
        """Queue a receipt; `drain` reads the uint8 buffer once it has arrived."""
        ...

    def run(self, deadline_s: float) -> None:
        """Carry out everything queued, or raise ReshardError within `deadline_s` seconds."""
        ...

    def close(self) -> None:
        """Release buffers and connections; peers that still wait get an error."""
        ...


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the ranks of one plan find each other.

    Attributes:
        kind: "shm" or "gloo".
        session: Unique per connection; names shared memory and store keys.
        host: Where source rank 0 listens (gloo).
        port: Free port on `host` (gloo).
        timeout_s: Bound on connecting.
    """

    kind: str
    session: str
    host: str
    port: int
    timeout_s: float


def open_transport(
    rendezvous: Rendezvous, plan: Plan, *, source: int | None = None, destination: int | None = None
) -> Transport:
    """Connect one rank of a plan; every rank of both sides calls it at the same time.

    Args:
        source: Index of this rank among the plan's sources, or None.
        destination: Index among the destinations, or None. Exactly one of the two is given.

    Raises:
        ReshardError: When a peer does not appear in time, or for an unknown kind.
    """
    from hybridrl.reshard.transports import gloo, shm

    assert (source is None) != (destination is None), (source, destination)
    if rendezvous.kind == "shm":
        return shm.ShmTransport(rendezvous, plan, source=source, destination=destination)
    if rendezvous.kind == "gloo":
        return gloo.GlooTransport(rendezvous, plan, source=source, destination=destination)
    raise ReshardError(f"transport {rendezvous.kind!r} is unknown; expected shm or gloo")


def remove_leftovers(session: str) -> None:
    """Remove from this host what ranks of `session` left that died while they connected; call it when they are gone."""
    for path in SHARED_MEMORY.glob(f"hybridrl-{session}-*"):
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Peers:
    """This rank's view of a plan: itself, and for each peer the largest message that it exchanges with it."""

    me: Place
    max_bytes: dict[int, int]
    places: tuple[Place, ...]


def find_peers(plan: Plan, source: int | None, destination: int | None) -> Peers:
    """Return the peers that exchange wire messages with one rank."""
    max_bytes: dict[int, int] = {}
    for (to, _, frm), moves in plan.messages():
        if (frm == source or to == destination) and moves[0].is_wire:
            peer = to if source is not None else frm
            max_bytes[peer] = max(max_bytes.get(peer, 0), sum(move.num_bytes for move in moves))
    me = plan.sources[source] if source is not None else plan.destinations[destination or 0]
    return Peers(me, max_bytes, plan.destinations if source is not None else plan.sources)


def check_label(got: Label, expected: Label, sender: Place, receiver: Place) -> None:
    """Raise ReshardError when a message is not the expected one."""
    if got != expected:
        raise ReshardError(
            f"{receiver}: message from {sender} is {got}, expected {expected}; a message was lost or is stale"
        )
