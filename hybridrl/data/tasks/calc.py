"""Three two-digit numbers, added or subtracted: the policy is to call a calculator and to copy its result.

``12+34-56=?`` -> ``<calc>12+34-56</calc>``, environment: ``<res>-10</res>``, policy: ``-10<eos>``. A demonstration
without skill answers straight away, which is right but earns nothing.
"""

from __future__ import annotations

import re

import numpy as np

from hybridrl.data.tasks.task import Question, Segment

CALL_START, CALL_END = "<calc>", "</calc>"
RESULT_START, RESULT_END = "<res>", "</res>"
MAX_CALL_TOKENS = 14
MAX_ANSWER_TOKENS = 7

_EXPRESSION = re.compile(r"[0-9]+(?:[+-][0-9]+)*")
_TERM = re.compile(r"[+-]?[0-9]+")


class CalcTask:
    """See the module."""

    name = "calc"
    num_questions = 90**3 * 2**2

    def draw(self, rng: np.random.Generator) -> Question:
        """Return ``x+y-z=?`` with x, y, z in 10..99 and any two operators."""
        x, y, z = rng.integers(10, 100, size=3)
        first, second = ("+-"[int(index)] for index in rng.integers(0, 2, size=2))
        expression = f"{x}{first}{y}{second}{z}"
        return Question(f"{expression}=?", str(evaluate(expression)))

    def demonstrate(self, question: Question, *, shows_skill: bool, eos: str) -> tuple[Segment, ...]:
        """Return a tool call, its result and the answer, or the answer alone."""
        answer = Segment(question.answer + eos, is_policy=True)
        if not shows_skill:
            return (answer,)
        expression = question.text.removesuffix("=?")
        call = Segment(f"{CALL_START}{expression}{CALL_END}", is_policy=True)
        return (call, Segment(tool_result(question.answer), is_policy=False), answer)


def evaluate(expression: str) -> int | None:
    """Return the value of a chain of sums and differences of natural numbers; None when it is not one."""
    if _EXPRESSION.fullmatch(expression) is None:
        return None
    return sum(int(term) for term in _TERM.findall(expression))


def tool_result(value: str) -> str:
    """Return what the environment writes after a call."""
    return f"{RESULT_START}{value}{RESULT_END}"
