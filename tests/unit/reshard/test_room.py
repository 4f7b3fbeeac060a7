"""A file has its room before it is written to, where the file system can say so."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridrl.reshard import room
from hybridrl.reshard.room import take_room

NUM_BYTES = 1 << 20


def _fallocate_fails(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fallocate(*arguments: object) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(room, "_LIBC", SimpleNamespace(fallocate=fallocate))


def test_the_blocks_are_there(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        take_room(file.fileno(), NUM_BYTES)
        made = os.fstat(file.fileno())
    assert made.st_size == NUM_BYTES and made.st_blocks * 512 >= NUM_BYTES


def test_a_file_system_that_cannot_take_room_gives_the_size_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fallocate_fails(monkeypatch, errno.EOPNOTSUPP)
    with (tmp_path / "file").open("wb") as file:
        take_room(file.fileno(), NUM_BYTES)
        made = os.fstat(file.fileno())
    assert made.st_size == NUM_BYTES and made.st_blocks == 0


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fallocate_fails(monkeypatch, errno.ENOSPC)
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="No space left on device"):
        take_room(file.fileno(), NUM_BYTES)
