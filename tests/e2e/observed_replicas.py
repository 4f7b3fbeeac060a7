"""Rollout replicas that tests can look into: digests of the live tensors, process ids, and a fault that no checksum sees."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch

from hybridrl.engines.vllm.worker import WorkerExtension, _answered
from hybridrl.roles.rollout_replica import RolloutReplica


class ObservedWorker(WorkerExtension):
    """A rollout worker with a window."""

    _hybridrl_scale = 1.0

    @_answered
    def hybridrl_digests(self, request: None) -> dict[str, str]:
        """Return a digest of the bytes of every live parameter and buffer."""
        model = self._hybridrl_model()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: _digest(tensor) for name, tensor in tensors.items()}

    @_answered
    def hybridrl_spoil(self, scale: float) -> None:
        """Multiply the final norm after each later transfer, as a scale that was derived from other weights would."""
        self._hybridrl_scale = scale

    def hybridrl_receive(self, payload: bytes) -> bytes:
        """Receive, then put the planted fault in."""
        reply = super().hybridrl_receive(payload)
        if self._hybridrl_scale != 1.0:
            self._hybridrl_model().get_parameter("model.norm.weight").data.mul_(self._hybridrl_scale)
        return reply


class ObservedReplica(RolloutReplica):
    """A replica whose workers have a window."""

    async def start(self, is_joining: bool) -> Any:
        from hybridrl.engines.vllm import settings

        settings._WORKER_EXTENSION = f"{ObservedWorker.__module__}.{ObservedWorker.__qualname__}"
        return await super().start(is_joining)

    async def pid(self) -> int:
        return os.getpid()

    async def digests(self) -> list[dict[str, str]]:
        digests: list[dict[str, str]] = await self._engine._call("hybridrl_digests", None)
        return digests

    async def spoil(self, scale: float) -> None:
        await self._engine._call("hybridrl_spoil", scale)


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()
