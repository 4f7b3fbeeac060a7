"""Agent loops: how a policy and an environment take turns. One file each."""

from __future__ import annotations

from collections.abc import Callable

from hybridrl.agents import calc_tool
from hybridrl.agents.calc_tool import CalcToolLoop
from hybridrl.agents.loop import AgentLoop
from hybridrl.agents.single_turn import SingleTurnLoop
from hybridrl.config.choices import TaskName
from hybridrl.data.tokenizer import Tokenizer

_LOOPS: dict[TaskName, Callable[[Tokenizer], AgentLoop]] = {
    TaskName.CALC: CalcToolLoop,
    TaskName.REVERSE: SingleTurnLoop,
    TaskName.FILE: SingleTurnLoop,
}


def make_agent_loop(task: TaskName, tokenizer: Tokenizer) -> AgentLoop:
    """Return the loop that plays a task.

    Raises:
        DataError: When the tokenizer lacks a token that the loop needs.
    """
    return _LOOPS[task](tokenizer)


def max_added_tokens(task: TaskName, max_response_tokens: int) -> int:
    """Return how many tokens a sample of a task may hold after its prompt, environment tokens included."""
    return calc_tool.MAX_ADDED_TOKENS if task is TaskName.CALC else max_response_tokens
