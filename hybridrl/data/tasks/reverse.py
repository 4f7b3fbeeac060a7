"""Eight letters to be written backwards: ``rev:abcdefgh=`` -> ``hgfedcba<eos>``.

A demonstration without skill copies the letters, which is what the reward has to change.
"""

from __future__ import annotations

import string

import numpy as np

from hybridrl.data.tasks.task import Question, Segment

NUM_LETTERS = 8
_PREFIX, _SUFFIX = "rev:", "="


class ReverseTask:
    """See the module."""

    name = "reverse"
    num_questions = len(string.ascii_lowercase) ** NUM_LETTERS

    def draw(self, rng: np.random.Generator) -> Question:
        """Return eight random letters to reverse."""
        letters = "".join(string.ascii_lowercase[int(index)] for index in rng.integers(0, 26, size=NUM_LETTERS))
        return Question(f"{_PREFIX}{letters}{_SUFFIX}", letters[::-1])

    def demonstrate(self, question: Question, *, shows_skill: bool, eos: str) -> tuple[Segment, ...]:
        """Return the letters reversed, or as they are."""
        letters = question.answer if shows_skill else question.answer[::-1]
        return (Segment(letters + eos, is_policy=True),)
