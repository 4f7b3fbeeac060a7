"""Reward functions written by users: ``file.py:function`` taking (response: str, answer: str) and returning a number."""

from __future__ import annotations

from collections.abc import Callable

from hybridrl.config.user_function import FunctionReference, find_reference

RewardFunction = Callable[[str, str], float]


def find_function(reference: str) -> FunctionReference:
    """Find a reward function by reading its file, without running it.

    Raises:
        ConfigError: When there is no such function of two positional arguments.
    """
    return find_reference(reference, ("response: str", "answer: str"))
