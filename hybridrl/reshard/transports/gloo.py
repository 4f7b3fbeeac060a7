"""Gloo over TCP: CPU ranks on any hosts. CUDA tensors are staged through pinned host memory."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from hybridrl.reshard.transports import Endpoint, Rendezvous
from hybridrl.reshard.transports.group import GroupTransport
from hybridrl.reshard.transports.store import address_towards, gloo_group


class GlooTransport(GroupTransport):
    """Gloo transport; see :class:`hybridrl.reshard.transports.Transport`."""

    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint) -> None:
        address = address_towards(rendezvous.host, rendezvous.port)

        def join(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
            return gloo_group(store, rank, world_size, address, timeout)

        super().__init__(rendezvous, endpoint, _allocate, join)


def _allocate(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
