"""Both sides of a weight sync as real processes without engines: a real transport, real tensors, a state instead of vLLM.

Rank 1 of a side dies by SIGKILL when it is asked to do what the environment names, e.g. ``receive_weights``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import torch

from hybridrl.layout.box import Box, DType
from hybridrl.layout.shard import CanonicalTensor, LocalTensor, Place, Shard, ShardMap
from hybridrl.reshard.executor import Receiver, Sender, TensorSink, TransferReport
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.transports import Rendezvous, open_transport

DOOMED_RANK = 1
NAME, ROWS = "model.norm.weight", 1 << 16


def shard_map(role: str, rank: int) -> ShardMap:
    """Half of a tensor per source, all of it per destination."""
    first, last = (rank * ROWS // 2, (rank + 1) * ROWS // 2) if role == "actor" else (0, ROWS)
    local = LocalTensor("w", (last - first,), DType.FLOAT32)
    shard = Shard(NAME, Box((first,), (last,)), "w", 0, (1,))
    place = Place(role, rank, "host", f"{role}:{rank}")
    return ShardMap(place, {"w": local}, (shard,), {NAME: CanonicalTensor(NAME, (ROWS,))})


class ThinRank:
    """One rank of either side."""

    def __init__(self, role: str, rank: int, doomed_phase: str) -> None:
        self._role, self._rank = role, rank
        self._doomed_phase = doomed_phase if rank == DOOMED_RANK else ""
        self._weights = {"w": torch.full((ROWS // 2 if role == "actor" else ROWS,), float(rank))}
        self._is_paused = self._is_stale = False
        self._end: Any = None

    def connect_sync(self, rendezvous: Rendezvous, part: Plan) -> None:
        self._die_in("connect_sync")
        if self._end is not None:
            self._end._transport.close()
        if self._role == "actor":
            self._end = Sender(part, self._rank, open_transport(rendezvous, part, source=self._rank))
        else:
            self._end = Receiver(part, self._rank, open_transport(rendezvous, part, destination=self._rank))

    def pause(self) -> None:
        self._die_in("pause")
        self._is_paused = True

    def send_weights(self, version: int, deadline_s: float) -> TransferReport:
        self._die_in("send_weights")
        report: TransferReport = self._end.run(self._weights, version, deadline_s)
        return report

    def receive_weights(self, version: int, deadline_s: float) -> list[TransferReport]:
        self._is_stale = True
        self._die_in("receive_weights")
        return [self._end.run(TensorSink(self._weights), version, deadline_s)]

    def commit(self, version: int) -> None:
        self._die_in("commit")
        self._is_stale = False

    def resume(self) -> None:
        self._die_in("resume")
        self._is_paused = False

    def weights(self) -> torch.Tensor:
        """Return what this rank holds."""
        return self._weights["w"]

    def may_sample(self) -> bool:
        """Whether a sample could be drawn, as :class:`RolloutEngine` decides it."""
        return not self._is_paused and not self._is_stale

    def _die_in(self, phase: str) -> None:
        if phase == self._doomed_phase:
            os.kill(os.getpid(), signal.SIGKILL)


def all_maps(role: str, num_ranks: int = 2) -> Sequence[ShardMap]:
    """Return the maps of a side."""
    return [shard_map(role, rank) for rank in range(num_ranks)]
