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
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except subprocess.TimeoutExpired as e:
        raise ProgramError(f"{command[0]} did not answer within {timeout_s:g} s") from e
    except subprocess.CalledProcessError as e:
        raise ProgramError((e.stderr or e.stdout).strip() or f"{command[0]} ended with {e.returncode}") from e
    return done.stdout
