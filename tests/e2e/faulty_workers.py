"""Training ranks with a fault built in: rank 1 dies by SIGKILL in the middle of a phase, raises, or flips a bit in transit.

When the fault strikes, the file that the environment names is made, so that a test knows the time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridrl.data.batch import PolicyBatch, SequenceBatch
from hybridrl.layout.roles import ModelRole
from hybridrl.reshard.transports import Fill, Label, Transport
from hybridrl.roles.megatron_worker import MegatronWorker

STRUCK_FILE_VARIABLE = "HYBRIDRL_TEST_STRUCK_FILE"
DELAY_S = 0.05
DOOMED_RANK = 1


def _strike() -> None:
    Path(os.environ[STRUCK_FILE_VARIABLE]).touch()


def _die() -> None:
    _strike()
    os.kill(os.getpid(), signal.SIGKILL)


class DiesInUpdate(MegatronWorker):
    """Rank 1 is killed while all ranks train."""

    def update(self, batch: PolicyBatch, loss: Any, temperature: float, want_logprobs: bool) -> Any:
        if self._rank == DOOMED_RANK:
            threading.Timer(DELAY_S, _die).start()
        return super().update(batch, loss, temperature, want_logprobs)


class DiesInLogprobs(MegatronWorker):
    """Rank 1 is killed while all ranks compute log-probs."""

    def logprobs(self, role: ModelRole, batch: SequenceBatch, temperature: float) -> Any:
        if self._rank == DOOMED_RANK:
            threading.Timer(DELAY_S, _die).start()
        return super().logprobs(role, batch, temperature)


class RaisesInUpdate(MegatronWorker):
    """Rank 1 raises while the others wait for it in a collective."""

    def update(self, batch: PolicyBatch, loss: Any, temperature: float, want_logprobs: bool) -> Any:
        if self._rank == DOOMED_RANK:
            _strike()
            raise ValueError("row 7 is odd")
        return super().update(batch, loss, temperature, want_logprobs)


class TamperedTransport:
    """Passes everything on, and calls `tamper` on the buffer of each message after it was packed."""

    def __init__(self, under: Transport, tamper: Callable[[torch.Tensor], None]) -> None:
        self._under = under
        self._tamper = tamper

    @property
    def staging_bytes(self) -> int:
        return self._under.staging_bytes

    def submit_send(self, peer: int, label: Label, fill: Fill) -> None:
        def fill_and_tamper(buffer: torch.Tensor) -> None:
            fill(buffer)
            self._tamper(buffer)

        self._under.submit_send(peer, label, fill_and_tamper)

    def submit_recv(self, peer: int, label: Label, drain: Fill) -> None:
        self._under.submit_recv(peer, label, drain)

    def run(self, deadline_s: float) -> None:
        self._under.run(deadline_s)

    def close(self) -> None:
        self._under.close()


class _Tampers(MegatronWorker):
    """Rank 1 tampers with its messages."""

    num_messages = 0

    def connect_sync(self, rendezvous: Any, plan: Any, verify: bool) -> None:
        super().connect_sync(rendezvous, plan, verify)
        assert self._connection is not None
        if self._rank == DOOMED_RANK:
            tampered = TamperedTransport(self._connection.transport, self._tamper)
            self._connection.sender._transport = tampered

    def _tamper(self, buffer: torch.Tensor) -> None:
        self.num_messages += 1
        self.tamper(buffer)

    def tamper(self, buffer: torch.Tensor) -> None:
        raise NotImplementedError


class DiesInSync(_Tampers):
    """Rank 1 is killed after it packed its second message: the receiver holds a part of the weights."""

    def tamper(self, buffer: torch.Tensor) -> None:
        if self.num_messages == 2:
            _die()


class FlipsOneBit(_Tampers):
    """One bit of rank 1's very first message is flipped."""

    def tamper(self, buffer: torch.Tensor) -> None:
        if self.num_messages == 1:
            buffer[len(buffer) // 2] ^= 0x10


class FlipsEveryTime(_Tampers):
    """One bit of each of rank 1's messages is flipped."""

    def tamper(self, buffer: torch.Tensor) -> None:
        buffer[len(buffer) // 2] ^= 0x10
