"""CUDA IPC between the processes of one node: the source packs straight into the destination's device memory.

Like ``shm.py`` with the same counters in shared memory, but the inbox lies on the destination's device. The sources map it over
its IPC handle, on the same GPU or over NVLink. A counter is published when the kernels before it have finished.
"""

from __future__ import annotations

import pickle

import torch
from torch.multiprocessing import reductions

from hybridrl.reshard.transports import Endpoint, Rendezvous
from hybridrl.reshard.transports.group import connect_store
from hybridrl.reshard.transports.inbox import Inbox
from hybridrl.reshard.transports.nccl import device_memory, require_cuda
from hybridrl.reshard.transports.shm import ShmTransport


class CudaIpcTransport(ShmTransport):
    """CUDA IPC transport; see :class:`hybridrl.reshard.transports.Transport`."""

    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint) -> None:
        require_cuda("cuda_ipc", endpoint.place)
        is_master = endpoint.is_source and endpoint.index == 0
        self._store = connect_store(rendezvous, is_master=is_master)
        super().__init__(rendezvous, endpoint)

    def _halves(self, destination: int, inbox: Inbox) -> torch.Tensor | None:
        if self._endpoint.is_source or destination != self._endpoint.index:
            rebuild, arguments = pickle.loads(bytes.fromhex(self._store.get(f"inbox-{destination}").decode()))
            memory: torch.Tensor = rebuild(*arguments)
            return memory
        memory = device_memory(2 * inbox.half_bytes)
        self._store.set(f"inbox-{destination}", pickle.dumps(reductions.reduce_tensor(memory)).hex())
        return memory

    def _flush(self) -> None:
        torch.cuda.current_stream().synchronize()
