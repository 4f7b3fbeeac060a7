r"""Rewards of a final answer: equal to the ground truth by character, by mathematics, or by reasoning-gym's rule.

The final answer of a response is what its last ``\boxed{...}`` holds, else its last ``<answer>...</answer>``, else all of it.
"""

from __future__ import annotations

import functools
import json
import re

from hybridrl.data.sources.reasoning_gym import PREFIX
from hybridrl.errors import DataError
from hybridrl.rewards.request import ScoreRequest

_BOXED = "\\boxed{"
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def final_answer(text: str) -> str:
    """Return the final answer of a response whose stop token has been taken off."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    tagged = _TAGGED.findall(text)
    return str(tagged[-1]).strip() if tagged else text.strip()


def exact_reward(request: ScoreRequest) -> float:
    """Return 1 when the final answer is the ground truth to the character, space around both left out."""
    return float(final_answer(request.final) == request.answer.strip())


def math_reward(request: ScoreRequest) -> float:
    """Return 1 when the response ends on an expression that is mathematically the ground truth.

    math-verify's own time limits need signals and hide what ran out of time; the limit of the scoring process takes their
    place.

    Raises:
        DataError: When the ground truth is no expression.
    """
    parse, verify = _math_verify()
    truth = parse(f"\\boxed{{{request.answer}}}", parsing_timeout=None)
    if not truth:
        raise DataError(f"answer {request.answer!r} is no mathematical expression, expected a number or LaTeX")
    found = parse(request.final, parsing_timeout=None)
    return float(bool(found) and verify(truth, found, timeout_seconds=None))


def reasoning_gym_reward(request: ScoreRequest) -> float:
    """Return the score, 0 to 1, by the rule of the reasoning-gym data set that the prompt is from.

    Raises:
        DataError: When the prompt is not from reasoning-gym.
    """
    from reasoning_gym import get_score_answer_fn

    if not request.data_source.startswith(PREFIX):
        raise DataError(f"prompt of data_source {request.data_source!r}, expected one that starts with {PREFIX}")
    score = get_score_answer_fn(request.data_source.removeprefix(PREFIX))
    return float(score(answer=final_answer(request.final), entry=json.loads(request.extra_info)))


@functools.cache
def _math_verify():  # type: ignore[no-untyped-def]  # noqa: ANN202  # functions of an untyped library
    from math_verify import parse, verify

    return parse, verify


def _last_boxed(text: str) -> str | None:
    r"""Return what the last ``\boxed{...}`` holds, with balanced braces; None when there is none."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    begin, depth = start + len(_BOXED), 1
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None
