"""Where memory of another process's device lies, as text that runs no code when it is read.

Whoever reaches the port of a store can write into it. So what is read from there is checked field by field, and what torch
would read or write past its end is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from hybridrl.errors import ReshardError
from hybridrl.layout.shard import Place

_NUM_REF_COUNTERS = 10_000  # torch/csrc/CudaIPCTypes.h: of 8 bytes each, in one file
_EVENT_HANDLE_BYTES = 64  # sizeof(cudaIpcEventHandle_t)


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """What torch's ``UntypedStorage._share_cuda_()`` returns, in its order.

    Attributes:
        device: Index of the device.
        handle: Of the allocation that the memory is a part of.
        storage_size_bytes: Size of the memory.
        storage_offset_bytes: Where it begins in the allocation.
        ref_counter_handle: Name of the shared memory with the counter of its users.
        ref_counter_offset: Index of the counter.
        event_handle: Of the event after which the memory is ready.
        event_sync_required: Whether to wait for that event.
    """

    device: int
    handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool

    def encode(self) -> str:
        """Return one JSON object, bytes in hex."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({name: v.hex() if isinstance(v, bytes) else v for name, v in values.items()})

    @classmethod
    def decode(cls, text: bytes, num_bytes: int, sender: Place, receiver: Place) -> IpcHandle:
        """Read what :meth:`encode` wrote.

        Args:
            num_bytes: Size that the memory must have.
            sender: Whose memory it is.
            receiver: This rank.

        Raises:
            ReshardError: The text is no handle of such memory.
        """
        try:
            values = json.loads(text)
            if not isinstance(values, dict) or values.keys() != {field.name for field in fields(cls)}:
                raise ValueError("its fields are others")
            found = cls(**{field.name: _READERS[str(field.type)](values[field.name]) for field in fields(cls)})
            found._check(num_bytes)
        except ValueError as e:
            raise ReshardError(
                f"{receiver}: what the store holds is no CUDA IPC handle of {sender}: {e}; "
                "does something else write to the port of the store?"
            ) from e
        return found

    def _check(self, num_bytes: int) -> None:
        if self.storage_size_bytes != num_bytes:
            raise ValueError(f"it is of {self.storage_size_bytes} bytes, expected {num_bytes}")
        if not self.handle or len(self.event_handle) != _EVENT_HANDLE_BYTES:
            raise ValueError(f"its handles have {len(self.handle)} and {len(self.event_handle)} bytes")
        if not self.ref_counter_handle.startswith(b"/torch_") or b"/" in self.ref_counter_handle[1:]:
            raise ValueError(f"torch has no counters in {self.ref_counter_handle!r}")
        if self.ref_counter_offset >= _NUM_REF_COUNTERS:
            raise ValueError(f"counter {self.ref_counter_offset}, expected one below {_NUM_REF_COUNTERS}")


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return bytes.fromhex(value)


_READERS: dict[str, Callable[[object], Any]] = {"int": _number, "bool": _flag, "bytes": _bytes}
