"""What a node gives its processes: shared memory, memory, limits, and a clock that agrees with those of others."""

from __future__ import annotations

import ctypes
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from hybridrl.cli.doctor.finding import Finding, Verdict

_GIB = 1 << 30
_ENOUGH_FILES, _ENOUGH_PROCESSES = 65536, 16384
_UNSYNCHRONISED = 0x40
_TIMEX = struct.Struct("I4xqqqqi")
_TIMEX_BYTES = 1024

Limit = Callable[[int], tuple[int, int]]
"""Returns the soft and the hard limit of a resource."""


def shared_memory(folder: Path) -> Finding:
    """Look at what weight transfers inside a node need."""
    free = shutil.disk_usage(folder).free
    advice = "give the container --ipc host or a larger --shm-size; remove what dead runs left there"
    verdict = Verdict.OK if free >= _GIB else Verdict.PROBLEM
    return Finding("shared memory", verdict, f"{free / _GIB:.1f} GiB free in {folder}", advice)


def memory() -> Finding:
    """Look at the memory that is free."""
    free = psutil.virtual_memory().available
    advice = "the demos take 6 GiB; end what else is running"
    verdict = Verdict.OK if free >= 6 * _GIB else Verdict.WARNING
    return Finding("memory", verdict, f"{free / _GIB:.1f} GiB free", advice)


def limits(limit: Limit, *, has_fabric: bool) -> Iterator[Finding]:
    """Yield the limits on files, processes and locked memory.

    Args:
        has_fabric: Whether network cards lock memory of processes.
    """
    soft, hard = limit(resource.RLIMIT_NOFILE)
    advice = f"ulimit -n {_ENOUGH_FILES} (container: --ulimit nofile), for many ranks on a node"
    yield Finding("open files", _enough(soft, _ENOUGH_FILES), f"{_words(soft)}, at most {_words(hard)}", advice)
    soft, hard = limit(resource.RLIMIT_NPROC)
    advice = f"ulimit -u {_ENOUGH_PROCESSES}: Ray and the engines start threads by the hundred, which count"
    yield Finding("processes", _enough(soft, _ENOUGH_PROCESSES), f"{_words(soft)}, at most {_words(hard)}", advice)
    soft, _ = limit(resource.RLIMIT_MEMLOCK)
    is_short = has_fabric and soft != resource.RLIM_INFINITY
    advice = "ulimit -l unlimited (container: --ulimit memlock=-1): InfiniBand and RoCE lock the memory that they send"
    state = _words(soft) + ("" if soft == resource.RLIM_INFINITY else " bytes")
    yield Finding("locked memory", Verdict.PROBLEM if is_short else Verdict.OK, state, advice)


def clock(read: Callable[[], int | None]) -> Finding:
    """Look whether time comes from a server.

    Args:
        read: Returns the status of the kernel's clock (adjtimex); None when it cannot be read.
    """
    status = read()
    if status is None:
        return Finding("clock", Verdict.OK, "its status cannot be read here")
    if status & _UNSYNCHRONISED:
        advice = (
            "start chronyd or systemd-timesyncd on the host: logs and timelines of several nodes would not fit together"
        )
        return Finding("clock", Verdict.WARNING, "not synchronised", advice)
    return Finding("clock", Verdict.OK, "synchronised")


def clock_status() -> int | None:
    """Ask the kernel, changing nothing: modes of ``struct timex`` is 0."""
    answer = ctypes.create_string_buffer(_TIMEX_BYTES)
    if ctypes.CDLL(None).adjtimex(answer) < 0:
        return None
    *_, status = _TIMEX.unpack_from(answer)
    return int(status)


def _enough(limit: int, wanted: int) -> Verdict:
    return Verdict.OK if limit == resource.RLIM_INFINITY or limit >= wanted else Verdict.WARNING


def _words(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit}"
