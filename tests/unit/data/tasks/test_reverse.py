"""The reverse task."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.data.tasks.reverse import ReverseTask


@given(st.integers(0, 2**32))
def test_a_question_is_eight_letters_and_its_answer_is_them_backwards(seed: int) -> None:
    question = ReverseTask().draw(np.random.default_rng(seed))
    letters = question.text.removeprefix("rev:").removesuffix("=")
    assert len(letters) == 8
    assert letters.isalpha()
    assert question.answer == "".join(reversed(letters))


def test_a_demonstration_reverses_or_copies() -> None:
    question = ReverseTask().draw(np.random.default_rng(1))
    (shown,) = ReverseTask().demonstrate(question, shows_skill=True, eos="<eos>")
    (habit,) = ReverseTask().demonstrate(question, shows_skill=False, eos="<eos>")
    assert shown.text == question.answer + "<eos>"
    assert habit.text == question.text[4:12] + "<eos>"
    assert shown.is_policy
    assert habit.is_policy
