"""CUDA IPC between the processes of one node: the source packs straight into the destination's device memory.

Like ``shm.py`` with the same counters in shared memory, but the inbox lies on the destination's device. The sources map it over
its IPC handle, on the same GPU or over NVLink. A counter is published when the kernels before it have finished.
"""

from __future__ import annotations

import torch
from torch.multiprocessing import reductions

from hybridrl.reshard.transports import Endpoint, Rendezvous
from hybridrl.reshard.transports.group import connect_store
from hybridrl.reshard.transports.inbox import Inbox
from hybridrl.reshard.transports.ipc_handle import IpcHandle
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
        num_bytes, key = 2 * inbox.half_bytes, f"inbox-{destination}"
        if self._endpoint.is_source or destination != self._endpoint.index:
            place = self._endpoint.plan.destinations[destination]
            return _mapped(IpcHandle.decode(self._store.get(key), num_bytes, place, self._me))
        memory = device_memory(num_bytes)
        self._store.set(key, IpcHandle(*memory.untyped_storage()._share_cuda_()).encode())
        return memory

    def _flush(self) -> None:
        torch.cuda.current_stream().synchronize()


def _mapped(handle: IpcHandle) -> torch.Tensor:
    """Map another process's memory as bytes."""
    memory: torch.Tensor = reductions.rebuild_cuda_tensor(
        torch.Tensor,
        (handle.storage_size_bytes,),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        handle.device,
        handle.handle,
        handle.storage_size_bytes,
        handle.storage_offset_bytes,
        False,
        handle.ref_counter_handle,
        handle.ref_counter_offset,
        handle.event_handle,
        handle.event_sync_required,
    )
    return memory
