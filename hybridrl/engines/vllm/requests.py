"""What the engine asks of its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridrl.engines.profiler import ProfileLaunch
from hybridrl.layout.shard import CanonicalTensor
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.transports import Rendezvous


@dataclass(frozen=True, slots=True)
class LearnRequest:
    """Asks a worker for its shard map.

    Attributes:
        canonical: Every tensor of the checkpoint.
        first_rank: Rollout rank of the replica's worker 0.
        node: Host name of the replica.
    """

    canonical: Mapping[str, CanonicalTensor]
    first_rank: int
    node: str


@dataclass(frozen=True, slots=True)
class ConnectRequest:
    """Asks the workers of a replica to join the transfer of a plan.

    Attributes:
        parts: What each worker receives, in rank order.
    """

    rendezvous: Rendezvous
    parts: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class ReceiveRequest:
    """Asks a connected worker to receive all its weights once, as `version`."""

    version: int
    verify: bool
    deadline_s: float


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """Asks the workers of a replica to profile themselves as of a step, if their ranks are profiled.

    Attributes:
        first_rank: Rollout rank of the replica's worker 0.
    """

    launch: ProfileLaunch | None
    step: int
    first_rank: int
