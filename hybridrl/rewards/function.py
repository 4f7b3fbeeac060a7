"""Reward functions written by users: ``file.py:function`` taking (response: str, answer: str) and returning a number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybridrl.config import user_function
from hybridrl.config.user_function import FunctionReference
from hybridrl.errors import ConfigError

RewardFunction = Callable[[str, str], float]
_ARGUMENTS = ("response: str", "answer: str")


def find_function(reference: str) -> FunctionReference:
    """Find a reward function by reading its file.

    Raises:
        ConfigError: When the reference is not of the form file.py:function, the file is missing or is not Python, or
            does not define that function with two positional arguments.
    """
    path_text, separator, name = reference.rpartition(":")
    path = Path(path_text)
    if not separator or not name.isidentifier() or path.suffix != ".py":
        raise ConfigError(f"got {reference!r}, expected file.py:function, for example rewards.py:score")
    found = FunctionReference(path, name)
    user_function.find_function(found, _ARGUMENTS)
    return found


def load_function(reference: FunctionReference) -> RewardFunction:
    """Run the file and return its function.

    Raises:
        ImportError: When the file cannot be loaded; whatever the file raises passes through.
    """
    return user_function.load_function(reference)
