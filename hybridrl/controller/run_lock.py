"""One process at a time goes on with a run: two would drop each other's steps and checkpoints.

The lock is the kernel's (flock) and goes with the process that holds it. NFSv4 drops those of a machine that died after 90 s, NFSv3 perhaps
never; removing the file is then the way out. Where the file system has no locks, there is no guard.
"""

from __future__ import annotations

import contextlib
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


@contextlib.contextmanager
def sole_writer(run_dir: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold a run, which may not have its folder yet, for as long as the context lasts.

    Args:
        tell: Shows a line.

    Raises:
        ConfigError: Another process holds it, also after the time in which the locks of a lost machine go; names that process.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    path, until = run_dir.with_name(f".{run_dir.name}.lock"), time.monotonic() + _WAIT_S
    is_told = False
    while (file := _locked(path)) is None:
        text = f"{run_dir} is in use by {path.read_text() or 'another process'}"
        if time.monotonic() > until:
            raise ConfigError(
                f"name: {text}; wait for its end, stop it, or choose another name. If its machine was lost, remove {path}"
            )
        if not is_told:
            tell(f"{text}; waiting for its end, {_WAIT_S:g} s at most")
            is_told = True
        time.sleep(_POLL_S)
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _locked(path: Path) -> TextIO | None:
    """Return the file with the lock on it; None when another process has that."""
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:  # no locks here
        return file
    return file
