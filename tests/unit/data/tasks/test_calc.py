"""The calculator task."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.data.tasks.calc import MAX_ANSWER_TOKENS, MAX_CALL_TOKENS, CalcTask, evaluate, tool_result
from tests.unit.data.tokenizers import demo_tokenizer


@given(st.integers(0, 2**32))
def test_questions_are_three_two_digit_numbers_with_their_value(seed: int) -> None:
    question = CalcTask().draw(np.random.default_rng(seed))
    match = re.fullmatch(r"([1-9]\d)([+-])([1-9]\d)([+-])([1-9]\d)=\?", question.text)
    assert match is not None
    x, first, y, second, z = match.groups()
    signs = {"+": 1, "-": -1}
    assert int(question.answer) == int(x) + signs[first] * int(y) + signs[second] * int(z)


@pytest.mark.parametrize(
    "expression", ["", "1+", "+1", "-1", "1--2", "1+2=", "1*2", "1 + 2", "(1)", "x", "1.0", "\u0661+\u0662"]
)
def test_what_is_no_sum_has_no_value(expression: str) -> None:
    assert evaluate(expression) is None


@given(st.lists(st.integers(0, 10**6), min_size=1), st.randoms(use_true_random=False))
def test_a_chain_of_terms_has_the_value_of_integer_arithmetic(terms: list[int], random: object) -> None:
    signs = [1, *(random.choice([1, -1]) for _ in terms[1:])]  # type: ignore[attr-defined]
    text = str(terms[0]) + "".join(f"{'+' if s > 0 else '-'}{t}" for s, t in zip(signs[1:], terms[1:], strict=True))
    assert evaluate(text) == sum(sign * term for sign, term in zip(signs, terms, strict=True))


@given(st.text("0123456789+-", max_size=MAX_CALL_TOKENS - 2))
def test_a_result_has_no_more_tokens_than_its_call(expression: str) -> None:
    value = evaluate(expression)
    if value is not None:
        assert len(demo_tokenizer().encode(tool_result(str(value)))) <= len(expression) + 2


@given(st.integers(0, 2**32))
def test_demonstrations_fit_into_the_limits_of_the_loop(seed: int) -> None:
    question = CalcTask().draw(np.random.default_rng(seed))
    call, result, answer = CalcTask().demonstrate(question, shows_skill=True, eos="<eos>")
    assert (call.is_policy, result.is_policy, answer.is_policy) == (True, False, True)
    assert len(demo_tokenizer().encode(call.text)) <= MAX_CALL_TOKENS
    assert len(demo_tokenizer().encode(answer.text)) <= MAX_ANSWER_TOKENS
    assert CalcTask().demonstrate(question, shows_skill=False, eos="<eos>") == (answer,)
