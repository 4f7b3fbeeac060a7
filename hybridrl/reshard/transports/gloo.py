"""Gloo over TCP: CPU ranks on any hosts. CUDA tensors are staged through pinned host memory."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from hybridrl.reshard.transports import Endpoint, Rendezvous
from hybridrl.reshard.transports.group import GroupTransport


class GlooTransport(GroupTransport):
    """Gloo transport; see :class:`hybridrl.reshard.transports.Transport`."""

    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint) -> None:
        super().__init__(rendezvous, endpoint, _allocate, _join)


def _allocate(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _join(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, world_size, timeout)
