"""What looking at one thing gives, and how programs of the machine are asked."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

_TIMEOUT_S = 20.0


class Verdict(Enum):
    """How a finding is meant: a problem stops or slows runs, a warning does so to some."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `advice` says what to do when it is not ok."""

    what: str
    verdict: Verdict
    state: str
    advice: str = ""


class ProgramError(Exception):
    """A program that did not answer, or answered with an error."""


Ask = Callable[[Sequence[str]], str | None]
"""Runs a program and returns what it prints; None when there is no such program. Raises ProgramError."""


def ask(command: Sequence[str], timeout_s: float = _TIMEOUT_S) -> str | None:
    """Ask a program of this machine."""
    if shutil.which(command[0]) is None:
        return None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as e:
        process.kill()  # not waited for: in the call of a driver that hangs, a process does not end
        raise ProgramError(f"{command[0]} did not answer within {timeout_s:g} s") from e
    if process.returncode:
        raise ProgramError((errors or output).strip() or f"{command[0]} ended with {process.returncode}")
    return output
