"""A CUDA IPC handle crosses the store as text; whatever else lies there is refused, and runs nothing."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl.errors import ReshardError
from hybridrl.layout.shard import Place
from hybridrl.reshard.transports.ipc_handle import IpcHandle

SENDER, RECEIVER, NUM_BYTES = Place("rollout", 1, "a", "1"), Place("actor", 0, "a", "0"), 1 << 20
HANDLE = IpcHandle(1, b"c\x00\xff" * 21, NUM_BYTES, 512, b"/torch_12_345_0", 7, bytes(range(64)), True)


def decode(text: str | bytes) -> IpcHandle:
    return IpcHandle.decode(text.encode() if isinstance(text, str) else text, NUM_BYTES, SENDER, RECEIVER)


def changed(**values: Any) -> str:
    return json.dumps(json.loads(HANDLE.encode()) | values)


def test_a_handle_is_the_same_after_the_store() -> None:
    assert decode(HANDLE.encode()) == HANDLE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        (b"\xff\xfe\x00", "codec can't decode"),
        ("[1, 2]", "its fields are others"),
        (json.dumps({"device": 0}), "its fields are others"),
        (changed(more=1), "its fields are others"),
        (changed(device=-1), "-1 is no whole number"),
        (changed(device=True), "True is no whole number"),
        (changed(storage_offset_bytes="0"), "'0' is no whole number"),
        (changed(event_sync_required=1), "1 is neither true nor false"),
        (changed(handle="xy"), "non-hexadecimal number"),
        (changed(handle=None), "None is no text"),
        (replace(HANDLE, handle=b"").encode(), "its handles have 0 and 64 bytes"),
        (replace(HANDLE, event_handle=b"short").encode(), "its handles have 63 and 5 bytes"),
        (replace(HANDLE, storage_size_bytes=NUM_BYTES + 1).encode(), "it is of 1048577 bytes, expected 1048576"),
        (replace(HANDLE, ref_counter_offset=10_000).encode(), "counter 10000, expected one below 10000"),
        (replace(HANDLE, ref_counter_handle=b"/hybridrl-1-0").encode(), "torch has no counters in b'/hybridrl-1-0'"),
        (replace(HANDLE, ref_counter_handle=b"/torch_/../x").encode(), "torch has no counters in b'/torch_/../x'"),
    ],
)
def test_anything_else_is_refused_with_its_reason(text: str | bytes, reason: str) -> None:
    with pytest.raises(ReshardError) as caught:
        decode(text)
    message = str(caught.value)
    assert message.startswith("actor rank 0: what the store holds is no CUDA IPC handle of rollout rank 1: ")
    assert reason in message


class Intruder:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_code_in_the_store_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for text in (pickle.dumps(Intruder(path)), pickle.dumps(Intruder(path)).hex().encode()):
        with pytest.raises(ReshardError, match="is no CUDA IPC handle"):
            decode(text)
    assert not path.exists()
