"""How bytes travel between the ranks of a plan.

A transport connects one rank with those that it sends to and receives from. What a destination receives in one chunk lies in one half of its
inbox (``inbox.py``), so that a chunk arrives while the one before is unpacked. Every wait is bounded; a peer that fails or falls
silent becomes a :class:`ReshardError` that names both ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from hybridrl.errors import ReshardError
from hybridrl.layout.shard import Place
from hybridrl.reshard.plan import Plan

Fill = Callable[[torch.Tensor], None]

SHARED_MEMORY = Path("/dev/shm")
"""Where the files of the shm transport lie, named ``hybridrl-<session>-<destination>``."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a message is, checked on arrival so that a stale or lost one is never taken for another."""

    version: int
    chunk: int
    num_bytes: int


class Transport(Protocol):
    """One rank's connections; who sends is an index into ``plan.senders``, who receives one into ``plan.destinations``.

    A destination goes chunk by chunk: first what sources send, then what it sends itself, then what other destinations do.
    """

    @property
    def staging_bytes(self) -> int:
        """Memory that this rank holds for messages."""
        ...

    def submit_send(self, destination: int, label: Label, fill: Fill) -> None:
        """Queue a message; `fill` packs it into a uint8 buffer of `label.num_bytes` once there is room."""
        ...

    def submit_recv(self, sender: int, label: Label, drain: Fill) -> None:
        """Queue a receipt; `drain` reads the uint8 buffer once it has arrived, after all those of earlier chunks."""
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
        kind: A key of the table in :func:`open_transport`.
        session: Unique per connection; names shared memory and store keys.
        host: Where source rank 0 listens (all but shm).
        port: Free port on `host` (all but shm).
        timeout_s: Bound on connecting.
    """

    kind: str
    session: str
    host: str
    port: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One rank of a plan, and which of its messages a transport carries.

    Attributes:
        is_source: Which side `index` counts.
        same_node: Carry only what stays in a node (True) or leaves it (False); None carries both.
    """

    plan: Plan
    index: int
    is_source: bool
    same_node: bool | None = None

    @property
    def place(self) -> Place:
        """This rank."""
        return self.plan.senders[self.sender]

    @property
    def sender(self) -> int:
        """This rank's index into ``plan.senders``."""
        return self.index if self.is_source else len(self.plan.sources) + self.index

    def carries(self, sender: int, destination: int) -> bool:
        """Whether messages between two ranks belong to this transport; the same on every rank."""
        return self.same_node is None or self.plan.is_near(sender, destination) is self.same_node

    def only(self, *, same_node: bool) -> Endpoint:
        """Return this endpoint for the messages inside a node, or between nodes."""
        return replace(self, same_node=same_node)


def open_transport(
    rendezvous: Rendezvous, plan: Plan, *, source: int | None = None, destination: int | None = None
) -> Transport:
    """Connect one rank of a plan; every rank of both sides calls it at the same time.

    A process that is a rank of both sides opens both at once, from two threads.

    Args:
        source: Index of this rank among the plan's sources, or None.
        destination: Index among the destinations, or None. Exactly one of the two is given.

    Raises:
        ReshardError: When a peer does not appear in time, for an unknown kind, or one that needs a device which is not there.
    """
    from hybridrl.reshard.transports import cuda_ipc, gloo, mixed, nccl, shm

    kinds: dict[str, Callable[[Rendezvous, Endpoint], Transport]] = {
        "shm": shm.ShmTransport,
        "gloo": gloo.GlooTransport,
        "mixed": mixed.MixedTransport,
        "nccl": nccl.NcclTransport,
        "cuda_ipc": cuda_ipc.CudaIpcTransport,
    }
    if rendezvous.kind not in kinds:
        raise ReshardError(f"transport {rendezvous.kind!r} is unknown; expected one of {', '.join(kinds)}")
    assert (source is None) != (destination is None), (source, destination)
    index = source if source is not None else destination or 0
    return kinds[rendezvous.kind](rendezvous, Endpoint(plan, index, is_source=source is not None))


def remove_leftovers(session: str) -> None:
    """Remove from this host what ranks of `session` left that died while they connected; call it when they are gone."""
    for path in SHARED_MEMORY.glob(f"hybridrl-{session}-*"):
        path.unlink(missing_ok=True)


def check_label(got: Label, expected: Label, sender: Place, receiver: Place) -> None:
    """Raise ReshardError when a message is not the expected one."""
    if got != expected:
        raise ReshardError(
            f"{receiver}: message from {sender} is {got}, expected {expected}; a message was lost, cut short or is stale"
        )
