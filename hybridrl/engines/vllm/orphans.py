"""Ends a replica's processes when the process that owns the replica is gone.

An owner that exits in order stops its engine. One that is killed cannot, and vLLM's engine process would live on with all its
memory. So each worker waits, in a thread that sleeps in the kernel, for the owner's end.
"""

from __future__ import annotations

import os
import select
import signal
import threading


def end_with(owner_pid: int) -> None:
    """Kill this process, and the engine process above it, once process `owner_pid` has ended. Linux only.

    Args:
        owner_pid: A process of the same host and user; the engine's or this worker's parent.
    """
    owner = os.pidfd_open(owner_pid)
    parent = os.getppid()

    def wait() -> None:
        select.select([owner], [], [])
        if parent != owner_pid and os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="hybridrl-owner-watch", daemon=True).start()
