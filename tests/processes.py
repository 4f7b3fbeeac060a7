"""Whether processes of tests have ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import psutil

_POLL_S = 0.05


def is_running(pid: int) -> bool:
    """Whether a process has not ended; a zombie has, whoever is to take its exit status."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def still_running(pids: Iterable[int], within_s: float) -> set[int]:
    """Return those of `pids` that have not ended within a time: a process takes its signal when it is next given a core."""
    until = time.monotonic() + within_s
    while (alive := {pid for pid in pids if is_running(pid)}) and time.monotonic() < until:
        time.sleep(_POLL_S)
    return alive


def stop(pid: int) -> None:
    """Stop a process by SIGSTOP and wait until it is."""
    process = psutil.Process(pid)
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(_POLL_S)
