"""One process at a time goes on with a run: two would drop each other's steps and checkpoints.

The lock is the kernel's (flock) and goes with the process that holds it. NFSv4 drops those of a machine that died after 90 s, NFSv3 perhaps
never: a Slurm job that was put back does not wait for what its own earlier start has left, since Slurm has ended that; anybody else removes
the file. Where the file system has no locks, there is no guard.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from hybridrl.errors import ConfigError

_WAIT_S = 100.0
_POLL_S = 0.5
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextlib.contextmanager
def sole_writer(run_dir: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold a run, which may not have its folder yet, for as long as the context lasts.

    Args:
        tell: Shows a line.

    Raises:
        ConfigError: Another process holds it, also after the time in which the locks of a lost machine go; names that process. Or the folder
            cannot be written to.
    """
    path = run_dir.with_name(f".{run_dir.name}.lock")
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        file = _acquired(path, run_dir, tell)
    except OSError as e:
        raise ConfigError(
            f"runs_dir: {path} cannot be written ({e.strerror}); correct its permissions, or choose another folder"
        ) from e
    with file:
        file.truncate(0)
        file.write(_own_name())
        file.flush()
        yield


def _acquired(path: Path, run_dir: Path, tell: Callable[[str], None]) -> TextIO:
    until, is_told = time.monotonic() + _WAIT_S, False
    while not _has_lock(file := path.open("a+", encoding="utf-8")):
        file.seek(0)
        holder = file.read() or "another process"
        if _is_put_back() and holder.endswith(_own_job()):
            tell(f"{run_dir} is marked as in use by {holder}, an earlier start of this very job; going on")
            return file
        file.close()
        text = f"{run_dir} is in use by {holder}"
        if time.monotonic() > until:
            raise ConfigError(
                f"name: {text}; wait for its end, stop it, or choose another name. If its machine was lost, remove {path}"
            )
        if not is_told:
            tell(f"{text}; waiting for its end, {_WAIT_S:g} s at most")
            is_told = True
        time.sleep(_POLL_S)
    return file


def _has_lock(file: TextIO) -> bool:
    """Lock a file; return whether this process may go on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            raise
    return True


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}{_own_job()}"


def _is_put_back() -> bool:
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def _own_job() -> str:
    job = os.environ.get("SLURM_JOB_ID")
    return f", Slurm job {job}" if job else ""
