"""NCCL between devices, on one node or many; messages stay in device memory."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from hybridrl.errors import ReshardError
from hybridrl.layout.shard import Place
from hybridrl.reshard.transports import Endpoint, Rendezvous
from hybridrl.reshard.transports.group import GroupTransport


class NcclTransport(GroupTransport):
    """NCCL transport; see :class:`hybridrl.reshard.transports.Transport`."""

    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint) -> None:
        require_cuda("nccl", endpoint.place)
        if not dist.is_nccl_available():
            raise ReshardError(f"{endpoint.place}: transport nccl needs a torch that was built with NCCL; use gloo")

        def join(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupNCCL:
            del timeout  # NCCL connects two ranks when they exchange their first message
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=rendezvous.timeout_s)  # the options have no other door
            return dist.ProcessGroupNCCL(store, rank, world_size, options)

        super().__init__(rendezvous, endpoint, device_memory, join)


def require_cuda(kind: str, me: Place) -> None:
    """Raise ReshardError on a rank that has no CUDA device."""
    if not torch.cuda.is_available():
        raise ReshardError(
            f"{me}: transport {kind} needs CUDA, but torch sees no device; set weight_sync.transport to auto, shm or gloo"
        )


def device_memory(num_bytes: int) -> torch.Tensor:
    """Allocate on the current device."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
