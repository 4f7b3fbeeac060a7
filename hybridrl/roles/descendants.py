"""The processes of a rank as one process group of its machine, so that its successor can see the last of them.

A rank that is killed leaves children behind: vLLM's engine and workers, with all their memory. They end themselves soon, or are
stuck, or had just begun. Whoever takes the rank's place there waits for them first and ends what is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

_POLL_S = 0.1
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Descent:
    """A process and all that it started, by the identity of its node and the number of its process group."""

    node: str
    group: int


def lead_descendants(node: str) -> Descent:
    """Make this process and whatever it will start a process group of its own."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    return Descent(node, os.getpid())


def end_descendants(descents: Sequence[Descent], node: str, grace_s: float = _GRACE_S) -> None:
    """Wait until all of `descents` that ran on `node` are gone; kill those that still run after `grace_s` seconds."""
    kill_at = time.monotonic() + grace_s
    groups = [descent.group for descent in descents if descent.node == node]
    while left := [group for group in groups if _is_running(group)]:
        if time.monotonic() > kill_at:
            for group in left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        time.sleep(_POLL_S)


def _is_running(group: int) -> bool:
    """Whether a group has a process that has not ended; a zombie has, whoever is to take its exit status."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
