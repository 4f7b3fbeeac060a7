"""Runs one program in a sandbox and waits for it, in bounded time, memory and output.

    this process -> confine.py (new session and namespaces) -> the program (pid 1 of its namespace, uid of its own)

What holds depends on what the machine allows:

    namespaces (root, or a user who may create them)   no network, whole file system read-only but for a small tmpfs,
                                                       other processes out of sight, killed with its pid namespace
    root without mount or pid namespaces               uid of its own: no write outside its folder except where everybody
                                                       may write; killed by uid
    a user without namespaces                          refused
    root without a network namespace                   refused, unless `allow_network` is set

Limits of processor time, address space, processes, open files and file size always hold; the environment is never passed
on. Only the standard library can be imported.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hybridrl.errors import HybridRLError

_CONFINE = Path(__file__).with_name("confine.py")
_START_S = 20.0
_FIRST_UID, _UIDS_PER_PROCESS = 1_000_000_000, 256
_DISK_FILES = 4
_num_started = itertools.count()


class SandboxError(HybridRLError):
    """A program that could not be run in a sandbox; says what the machine does not allow."""


class Outcome(enum.Enum):
    """How a program ended."""

    EXITED = "exited"
    TIMEOUT = "timeout"
    TOO_MUCH_OUTPUT = "too much output"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        timeout_s: Wall and processor time, in seconds.
        memory_mib: Address space of each process, in MiB.
        num_processes: Processes and threads at once.
        file_mib: Largest file, in MiB; its folder holds four times as much.
        output_kib: Standard output, in KiB.
        allow_network: Run even where the network cannot be taken away.
    """

    timeout_s: float
    memory_mib: int
    num_processes: int
    file_mib: int
    output_kib: int
    allow_network: bool = False


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended and what it wrote to standard output."""

    outcome: Outcome
    exit_code: int
    output: bytes


def run_program(source: str, stdin: str, limits: Limits) -> ProgramResult:
    """Run a Python program to its end and leave nothing of it behind.

    Raises:
        SandboxError: When this machine cannot confine it.
    """
    root = Path(tempfile.mkdtemp(prefix="hybridrl-sandbox-"))
    try:
        root.chmod(0o755)
        for name in ("work", "python"):
            (root / name).mkdir()
        (root / "program.py").write_bytes(source.encode("utf-8", "surrogatepass"))
        (root / "program.py").chmod(0o644)
        (root / "stdin").write_bytes(stdin.encode("utf-8", "surrogatepass"))
        return _Running(root, limits).wait()
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Running:
    """A program that is being started or runs."""

    def __init__(self, root: Path, limits: Limits) -> None:
        self._limits = limits
        # No two programs share a uid, so that what one leaves behind neither counts against the next nor survives it.
        self._uid = _FIRST_UID + os.getpid() * _UIDS_PER_PROCESS + next(_num_started) % _UIDS_PER_PROCESS
        self._program_pid: int | None = None
        self._has_pid_namespace = False
        if os.getuid() == 0:
            os.chown(root / "work", self._uid, self._uid)
        self._status, status_fd = os.pipe()
        spec = json.dumps(self._spec(root, status_fd))
        with (root / "stdin").open("rb") as stdin:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CONFINE), spec],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(status_fd,),
                start_new_session=True,
                env={},
            )
        os.close(status_fd)

    def _spec(self, root: Path, status_fd: int) -> dict[str, object]:
        python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        return {
            "root": str(root),
            "python": str(python),
            "python_prefix": str(Path(sys.base_prefix).resolve()),
            "status_fd": status_fd,
            "uid": self._uid,
            "caller_uid": os.getuid(),
            "caller_gid": os.getgid(),
            "allow_network": self._limits.allow_network,
            "cpu_s": self._limits.timeout_s,
            "memory_mib": self._limits.memory_mib,
            "num_processes": self._limits.num_processes,
            "file_mib": self._limits.file_mib,
            "disk_mib": self._limits.file_mib * _DISK_FILES,
        }

    def wait(self) -> ProgramResult:
        """Wait for the end of the program, at most for its time, and kill what is left of it."""
        try:
            outcome, output = self._collect()
        finally:
            self._kill()
        code = self._process.returncode
        return ProgramResult(outcome, code, output)

    def _collect(self) -> tuple[Outcome, bytes]:
        assert self._process.stdout is not None
        stdout, output, status = self._process.stdout.fileno(), bytearray(), bytearray()
        deadline_s = time.monotonic() + _START_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._status, selectors.EVENT_READ)
            selector.register(stdout, selectors.EVENT_READ)
            while True:
                events = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not events:
                    if self._program_pid is None:
                        raise SandboxError(
                            f"the sandbox did not start within {_START_S:g} s; the machine is overloaded"
                        )
                    return Outcome.TIMEOUT, bytes(output)
                ready = {key.fd for key, _ in events}
                if stdout in ready:
                    chunk = os.read(stdout, 65536)
                    output += chunk
                    if len(output) > self._limits.output_kib << 10:
                        return Outcome.TOO_MUCH_OUTPUT, bytes(output[: self._limits.output_kib << 10])
                    if not chunk:
                        selector.unregister(stdout)
                elif self._status in ready:
                    line = os.read(self._status, 4096)
                    if not line:
                        return self._ended(status), bytes(output)
                    status += line
                    if self._program_pid is None and status.endswith(b"\n"):
                        self._started(status)
                        deadline_s = time.monotonic() + self._limits.timeout_s

    def _started(self, status: bytearray) -> None:
        """Read what ``confine.py`` says."""
        for line in status.splitlines():
            facts = json.loads(line)
            if "refused" in facts:
                raise SandboxError(f"programs cannot be confined: {facts['refused']}")
            self._program_pid, self._has_pid_namespace = int(facts["pid"]), bool(facts["has_pid_namespace"])

    def _ended(self, status: bytearray) -> Outcome:
        self._started(status)
        if self._program_pid is None:
            raise SandboxError(f"the sandbox ended before the program started, with exit code {self._process.wait()}")
        return Outcome.EXITED

    def _kill(self) -> None:
        """Kill the program, everything that it started, and the process that confined it."""
        if self._program_pid is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._program_pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if os.getuid() == 0 and not self._has_pid_namespace:
            _kill_uid(self._uid)
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self._status)


def _kill_uid(uid: int) -> None:
    """Kill every process of a uid that belongs to one sandbox alone."""
    script = f"import os; os.setresuid({uid}, {uid}, {uid}); os.kill(-1, 9)"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=False, timeout=_START_S, capture_output=True)
