"""Rewards of the generated tasks: 1 for the exact response, else 0.

A response is read as text with special tokens shown. The marks of a result cannot be forged: a first turn ends at
``</calc>``, and what follows it is written by the environment. Preflight refuses tokenizers that write ``<eos>``
differently.
"""

from __future__ import annotations

import re

from hybridrl.config.choices import TaskName
from hybridrl.rewards.function import RewardFunction

EOS = "<eos>"
_TOOL_RESPONSE = re.compile(r"<calc>[^<>]*</calc><res>-?[0-9]+</res>(?P<answer>-?[0-9]+)<eos>")


def calc_reward(response: str, answer: str) -> float:
    """Return 1 when the calculator was called and the answer is exact; a direct answer earns 0, right or wrong."""
    match = _TOOL_RESPONSE.fullmatch(response)
    return float(match is not None and match["answer"] == answer)


def exact_reward(response: str, answer: str) -> float:
    """Return 1 when the response is the answer and then stops."""
    return float(response == answer + EOS)


_REWARDS: dict[TaskName, RewardFunction] = {TaskName.CALC: calc_reward, TaskName.REVERSE: exact_reward}


def task_reward(task: TaskName) -> RewardFunction | None:
    """Return the reward that a generated task brings; None for prompts from files."""
    return _REWARDS.get(task)
