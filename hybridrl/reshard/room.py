"""Room on a disk, taken before it is written to."""

from __future__ import annotations

import ctypes
import errno
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def take_room(descriptor: int, num_bytes: int) -> None:
    """Give an empty file its size, and its blocks where the file system has fallocate(2).

    Elsewhere, on NFS before 4.2 say, it gets its size alone: ``os.posix_fallocate`` would write into every block there, for hours with the files of
    a large model.

    Raises:
        OSError: There is no room.
    """
    if _LIBC.fallocate(descriptor, 0, 0, num_bytes) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, num_bytes)
