"""Evaluation counts what was scored, and its schedule has both ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hybridrl.controller.evaluation import EvaluationSchedule, Evaluator
from hybridrl.data.sample import Sample
from hybridrl.errors import DataError
from hybridrl.rewards.result import RewardResult
from tests.unit.controller.fakes import World, make_prompt, make_rewards


class Scores:
    def __init__(self, *rewards: float | None) -> None:
        self._rewards = rewards

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return make_rewards(self._rewards)


def _evaluator(*rewards: float | None) -> Evaluator:
    return Evaluator(World(), Scores(*rewards), [make_prompt(f"eval/{i}") for i in range(len(rewards))])


def test_accuracy_is_the_share_of_scored_samples_with_full_reward() -> None:
    evaluation = _evaluator(1.0, 0.5, None, 1.0).evaluate()
    assert evaluation.accuracy == pytest.approx(2 / 3)
    assert evaluation.reward_mean == pytest.approx(2.5 / 3)
    assert evaluation.metrics()["eval/dropped"] == 1
    assert evaluation.response_tokens_mean == 3


def test_an_evaluation_without_scores_is_an_error() -> None:
    with pytest.raises(DataError, match="none of 2 samples could be scored"):
        _evaluator(None, None).evaluate()


def test_the_schedule_includes_the_start_and_the_end_and_can_be_empty() -> None:
    every_4 = EvaluationSchedule(4, num_steps=10)
    assert every_4.is_on
    assert [step for step in range(10) if every_4.is_due_after(step)] == [3, 7, 9]
    never = EvaluationSchedule(0, num_steps=10)
    assert not never.is_on and not any(never.is_due_after(step) for step in range(10))
