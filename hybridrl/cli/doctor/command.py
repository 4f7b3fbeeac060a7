"""``hybridrl doctor``: what this machine and this installation are, and what of it would stop a run.

Looks only: nothing is started, repaired or removed, and no engine is imported. Each subject has a file; what it looks at is handed
to it here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import resource
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridrl.cli.doctor.devices import devices
from hybridrl.cli.doctor.fabric import gpudirect, ports, variables
from hybridrl.cli.doctor.finding import Finding, Verdict, ask
from hybridrl.cli.doctor.host import clock, clock_status, limits, memory, shared_memory
from hybridrl.cli.doctor.leftovers import leftovers, running_processes
from hybridrl.cli.doctor.software import cuda_of_torch, kernels, nccl, packages

_INFINIBAND = Path("/sys/class/infiniband")
_SHARED_MEMORY = Path("/dev/shm")
_PROC = Path("/proc")


def add_doctor_command(commands: Any) -> None:
    """Add the command to the parser's."""
    text = "look over this machine and installation, and say what would stop a run"
    commands.add_parser("doctor", help=text, description=text).set_defaults(look=_doctor)


def examine() -> Iterator[Finding]:
    """Yield what is found, in the order in which a run would need it."""
    cuda = cuda_of_torch()
    yield from packages(importlib.metadata.version, cuda)
    yield kernels()
    yield from devices(ask, cuda)
    yield from nccl(importlib.metadata.version, cuda)
    yield from ports(_INFINIBAND, Path("/dev/infiniband"))
    yield from gpudirect(_INFINIBAND, _PROC)
    yield from variables(os.environ, [name for _, name in socket.if_nameindex()])
    yield shared_memory(_SHARED_MEMORY)
    yield memory()
    yield from limits(resource.getrlimit, has_fabric=_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()))
    yield clock(clock_status)
    yield from leftovers(running_processes(), Path(tempfile.gettempdir()), _SHARED_MEMORY, _PROC)


def _doctor(_: argparse.Namespace) -> int:
    findings = list(examine())
    table = Table("what", "verdict", title="This machine")
    for column in ("state", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        advice = "" if finding.verdict is Verdict.OK else finding.advice
        table.add_row(finding.what, finding.verdict.value, finding.state, advice)
    Console().print(table)
    return 1 if any(finding.verdict is Verdict.PROBLEM for finding in findings) else 0
