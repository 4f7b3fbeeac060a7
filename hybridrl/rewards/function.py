"""Reward functions written by users: ``file.py:function`` taking (response: str, answer: str) and returning a number."""

from __future__ import annotations

from collections.abc import Callable

from hybridrl.data.user_function import FunctionReference, find_user_function

RewardFunction = Callable[[str, str], float]


def find_function(reference: str) -> FunctionReference:
    """Find a reward function by reading its file, without running it.

    Raises:
        ConfigError: When there is no such function of two positional arguments.
    """
    return find_user_function(reference, ("response: str", "answer: str"))
