"""What runs that were killed have left on this machine: processes, folders of Ray, segments of shared memory."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hybridrl.cli.doctor.finding import Finding, Verdict

_RAY_SERVERS = ("raylet", "gcs_server")
_OURS = ("ray::", "VLLM::")
_PRIVATE_FOLDERS = "hybridrl-ray-*"
_SEGMENTS = ("hybridrl-*", "vllm_dist_*-cpushm_*")
"""Of weight transfers, and of tensor-parallel samplers on CPUs."""
_INIT = 1


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine.

    Attributes:
        parent: Process id; 1 when the one that started it is gone.
        command: Name and arguments.
    """

    pid: int
    parent: int
    name: str
    command: str


def leftovers(processes: Sequence[Process], temporary: Path, shared_memory: Path, proc: Path) -> Iterator[Finding]:
    """Yield what no run owns any more.

    Args:
        temporary: Where Ray puts its folders.
        shared_memory: Where weight transfers and vLLM put their segments.
        proc: The kernel's /proc, to see who uses a segment.
    """
    yield from _ray(processes, temporary)
    workers = [p for p in _orphans(processes) if p.name.startswith(_OURS) or p.command.startswith(_OURS)]
    state = f"{len(workers)} workers whose run is gone" if workers else "none without a run"
    advice = f"kill {_ids(workers)}: they hold memory of GPUs"
    yield Finding("workers", Verdict.WARNING if workers else Verdict.OK, state, advice)
    yield _segments(shared_memory, proc)


def running_processes() -> list[Process]:
    """List the processes of this machine."""
    attributes = ("pid", "ppid", "name", "cmdline")
    found = (process.info for process in psutil.process_iter(attributes))
    return [Process(p["pid"], p["ppid"] or 0, p["name"] or "", " ".join(p["cmdline"] or ())) for p in found]


def _ray(processes: Sequence[Process], temporary: Path) -> Iterator[Finding]:
    servers = [process for process in processes if process.name in _RAY_SERVERS]
    private = sorted(temporary.glob(_PRIVATE_FOLDERS))
    dead = [folder for folder in private if not any(str(folder) in server.command for server in servers)]
    orphans = [p for p in _orphans(processes) if p in servers and any(str(folder) in p.command for folder in private)]
    if orphans:
        state, advice = f"{len(orphans)} processes whose run is gone", f"kill {_ids(orphans)}"
        yield Finding("Ray", Verdict.WARNING, state, advice)
    elif dead:
        which = f"{temporary}/{_PRIVATE_FOLDERS}" if dead == private else shlex.join(map(str, dead))
        yield Finding("Ray", Verdict.WARNING, f"{len(dead)} folders of runs that are gone", f"rm -r {which}")
    else:
        state = f"{len(servers)} processes of runs and clusters under way" if servers else "none"
        yield Finding("Ray", Verdict.OK, state)


def _segments(shared_memory: Path, proc: Path) -> Finding:
    """Look for segments that no process maps; those of other users are left out, whose processes do not show what they map."""
    sizes = {}
    for path in (path for pattern in _SEGMENTS for path in shared_memory.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):  # its run has just removed it
            status = path.stat()
            if status.st_uid == os.getuid():
                sizes[str(path)] = status.st_blocks * 512
    dead = sorted(sizes.keys() - (_mapped(proc, shared_memory) if sizes else set()))
    num_mib = sum(sizes[path] for path in dead) / 2**20
    state = f"{len(dead)} of runs that are gone, {num_mib:.0f} MiB" if dead else "none without a run"
    advice = f"rm {shlex.join(dead)}, unless a container that shares {shared_memory} runs"
    return Finding("shared memory segments", Verdict.WARNING if dead else Verdict.OK, state, advice)


def _orphans(processes: Sequence[Process]) -> list[Process]:
    """Return those whose parent is gone; in a container, the first process may be the run itself."""
    is_run = any(process.pid == _INIT and "hybridrl" in process.command for process in processes)
    return [] if is_run else [process for process in processes if process.parent == _INIT]


def _ids(processes: Sequence[Process]) -> str:
    return " ".join(str(process.pid) for process in processes)


def _mapped(proc: Path, folder: Path) -> set[str]:
    """Return the files of a folder that processes map."""
    found: set[str] = set()
    for maps in proc.glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()  # names of files need not be text
        except OSError:  # it ended, or belongs to another user
            continue
        found.update(
            words[5]
            for line in lines
            if len(words := line.split(maxsplit=5)) == 6 and words[5].startswith(f"{folder}/")
        )
    return found
