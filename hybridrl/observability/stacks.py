"""The processes of a run on this node, as /proc shows them: their heartbeats, their stacks, and their end.

Every process with a file of ``heartbeat.py`` is found, whoever started it. One that a stop signal or the kernel holds writes no stacks;
it is reported with the state that the kernel gives.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import psutil

from hybridrl.observability.heartbeat import HEARTBEAT, PAGE_BYTES, STACKS_SIGNAL, Identity, read_page

_PROC = Path("/proc")
_QUIET_S = 0.3
_POLL_S = 0.05
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_STOPPED = {psutil.STATUS_STOPPED: "stopped by a signal", psutil.STATUS_TRACING_STOP: "stopped by a debugger"}
STATES = _STOPPED | {
    psutil.STATUS_DISK_SLEEP: "in a system call that cannot be interrupted",
    psutil.STATUS_ZOMBIE: "dead",
    psutil.STATUS_DEAD: "dead",
}
"""What psutil's states of processes that cannot answer mean."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack.

    Attributes:
        source: The line of source, empty when its file is not at hand.
    """

    file: str
    line: int
    function: str
    source: str = ""

    def __str__(self) -> str:
        """Return where it is, short enough for a sentence."""
        short = re.split(r"(?:site|dist)-packages/", self.file)[-1]
        return f"{'/'.join(short.split('/')[-3:])}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]
"""The calls of one thread, innermost first."""


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """A process at one moment.

    Attributes:
        state: psutil's name for what the kernel has it in.
        doing: What it says that it works on.
        stacks: Of every thread, that of the main thread last; None when it did not answer.
        host: Where it runs, and is looked at.
    """

    identity: Identity
    pid: int
    state: str
    doing: str = ""
    stacks: tuple[Stack, ...] | None = None
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True, slots=True)
class _Found:
    identity: Identity
    pid: int
    file: Path


def progress(session: str) -> dict[int, int]:
    """Return the count of work done by process."""
    return {found.pid: _page(found)[0] for found in _find(session)}


def collect(session: str, timeout_s: float, pid: int | None = None) -> list[ProcessReport]:
    """Ask every process, or one, for its stacks, all at once; wait for those that are silent until `timeout_s` have passed.

    Children that have no heartbeat of their own are reported when they are stopped, and not otherwise.
    """
    waiting = {found: (_size(found), 0, time.monotonic()) for found in _find(session, pid)}
    for found in waiting:
        if found.pid == os.getpid():
            HEARTBEAT.write_stacks()
        else:
            _signal(found.pid, STACKS_SIGNAL)
    until, reports = time.monotonic() + timeout_s, _stopped_children([*waiting])
    while waiting:
        is_late = time.monotonic() >= until
        for found, (start, num_bytes, since) in list(waiting.items()):
            if (now := _size(found) - start) != num_bytes:
                waiting[found] = start, now, time.monotonic()
            elif is_late or (num_bytes and time.monotonic() - since > _QUIET_S) or _state(found.pid) in _STOPPED:
                reports.append(_report(found, start))
                del waiting[found]
        time.sleep(_POLL_S)
    return sorted(reports, key=lambda report: str(report.identity))


def kill(session: str, spare: Sequence[int] = ()) -> None:
    """End every process of a run on this node and its children, also stopped ones; those in `spare` and their other children stay."""
    roots = {found.pid for found in _find(session)} - set(spare)
    for pid in roots | {child.pid for root in roots for child in _descendants(root)}:
        _signal(pid, signal.SIGKILL)


def end_process(exit_code: int) -> NoReturn:
    """End this process at once, with all that it has started and what those have."""
    for child in _descendants(os.getpid()):
        _signal(child.pid, signal.SIGKILL)
    os._exit(exit_code)


def parse_stacks(text: str) -> tuple[Stack, ...]:
    """Read what faulthandler writes: threads from the newest to the main one."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if (frame := _FRAME.fullmatch(line)) and threads:
            file, number = frame["file"], int(frame["line"])
            threads[-1].append(Frame(file, number, frame["function"], linecache.getline(file, number).strip()))
        elif "(most recent call first)" in line:
            threads.append([])
    return tuple(tuple(frames) for frames in threads)


def _report(found: _Found, start: int) -> ProcessReport:
    text = ""
    with contextlib.suppress(OSError), found.file.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    return ProcessReport(found.identity, found.pid, _state(found.pid), _page(found)[1], parse_stacks(text) or None)


def _stopped_children(parents: Sequence[_Found]) -> list[ProcessReport]:
    own, reports = {parent.pid for parent in parents}, []
    for parent in parents:
        for child in _descendants(parent.pid):
            if child.pid not in own and (state := _state(child.pid)) in _STOPPED:
                identity = replace(parent.identity, part=f"child {_title(child)}")
                reports.append(ProcessReport(identity, child.pid, state))
    return reports


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):  # gone by now
        return psutil.Process(pid).children(recursive=True)
    return []


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return next(iter(process.cmdline()), str(process.pid))
    return str(process.pid)


def _state(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status()
    return psutil.STATUS_DEAD


def _find(session: str, only: int | None = None) -> Iterator[_Found]:
    for pid in psutil.pids() if only is None else [only]:
        with contextlib.suppress(OSError):  # another user's, or gone by now
            for file in (_PROC / str(pid) / "fd").iterdir():
                name = str(file.readlink()).removeprefix("/memfd:").removesuffix(" (deleted)")
                identity = Identity.parse(name)
                if identity is not None and identity.session == session:
                    yield _Found(identity, pid, file)
                    break


def _page(found: _Found) -> tuple[int, str]:
    try:
        with found.file.open("rb") as file:
            return read_page(file.read(PAGE_BYTES).ljust(PAGE_BYTES, b"\0"))  # empty for an instant
    except OSError:
        return 0, ""


def _size(found: _Found) -> int:
    try:
        return found.file.stat().st_size
    except OSError:
        return 0


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
