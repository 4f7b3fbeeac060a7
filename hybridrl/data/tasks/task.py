"""What a generated task is: questions drawn at random, a held-out share, and correct demonstrations."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

HELD_OUT_SHARE = 10


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its one right answer."""

    text: str
    answer: str

    @property
    def is_held_out(self) -> bool:
        """Whether this question is kept for evaluation: one in ten, chosen by its text."""
        return zlib.crc32(self.text.encode()) % HELD_OUT_SHARE == 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a demonstration; `is_policy` marks what the policy is to learn to write."""

    text: str
    is_policy: bool


class GeneratedTask(Protocol):
    """A source of questions."""

    @property
    def name(self) -> str:
        """Short name, as in the configuration."""
        ...

    @property
    def num_questions(self) -> int:
        """Different questions, held out or not."""
        ...

    def draw(self, rng: np.random.Generator) -> Question:
        """Return a random question, held out or not."""
        ...

    def demonstrate(self, question: Question, *, shows_skill: bool, eos: str) -> tuple[Segment, ...]:
        """Return the correct response to a question, ending with `eos`.

        Args:
            shows_skill: Whether it shows what the reward asks for, or a habit that the reward will have to change.
        """
        ...


def draw_question(task: GeneratedTask, rng: np.random.Generator, *, is_held_out: bool) -> Question:
    """Draw until a question falls on the wanted side of the split."""
    while True:
        question = task.draw(rng)
        if question.is_held_out == is_held_out:
            return question


def max_held_out(task: GeneratedTask) -> int:
    """Return how many different held-out questions may be asked for: half of them, so that random draws find them soon."""
    return task.num_questions // HELD_OUT_SHARE // 2
