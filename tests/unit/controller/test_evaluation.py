"""Evaluation counts what was scored, and its schedule has both ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hybridrl.config.choices import TaskName
from hybridrl.config.schema import ModelRewardConfig, RewardConfig
from hybridrl.controller.evaluation import Evaluation, EvaluationSchedule, Evaluator
from hybridrl.controller.interfaces import Scorer
from hybridrl.controller.model_reward import ModelScorer
from hybridrl.data.batch import SequenceBatch
from hybridrl.data.sample import Sample
from hybridrl.errors import DataError
from hybridrl.rewards.result import RewardResult
from hybridrl.rewards.score import make_scorer
from tests.unit.controller.fakes import FakeFuture, World, make_prompt, make_rewards


class Scores:
    def __init__(self, *rewards: float | None) -> None:
        self._rewards = rewards

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return make_rewards(self._rewards)


class Model:
    """Scores every sample 3."""

    def rewards(self, batch: SequenceBatch) -> FakeFuture[np.ndarray]:
        return FakeFuture(lambda: np.full(len(batch.lengths), 3, dtype=np.float32))


def _evaluated(rules: Scorer, samples_per_prompt: int) -> Evaluation:
    scorer = ModelScorer(rules, Model(), RewardConfig(model=ModelRewardConfig(weight=1.0, path="reward")))
    return Evaluator(World(), scorer, [make_prompt("eval/0"), make_prompt("eval/1")], samples_per_prompt).evaluate()


def _evaluator(*rewards: float | None) -> Evaluator:
    return Evaluator(World(), Scores(*rewards), [make_prompt(f"eval/{i}") for i in range(len(rewards))])


def test_accuracy_is_the_share_of_scored_samples_with_full_reward() -> None:
    evaluation = _evaluator(1.0, 0.5, None, 1.0).evaluate()
    assert evaluation.accuracy == pytest.approx(2 / 3)
    assert evaluation.reward_mean == pytest.approx(2.5 / 3)
    assert evaluation.metrics()["eval/dropped"] == 1
    assert evaluation.response_tokens_mean == 3


def test_a_reward_models_score_makes_no_sample_right() -> None:
    evaluation = _evaluated(Scores(1.0, 0.0, 0.0, 0.0), 2)
    assert evaluation.accuracy == 0.25 and evaluation.reward_mean == 3.25
    assert evaluation.metrics()["eval/pass_at_2"] == 0.5
    assert [reward for _, reward in evaluation.samples] == [4, 3, 3, 3]


def test_where_only_a_reward_model_scores_there_is_no_accuracy() -> None:
    evaluation = _evaluated(make_scorer(RewardConfig(), TaskName.FILE), 2)
    assert evaluation.accuracy is None and evaluation.metrics()["eval/reward_mean"] == 3
    assert not {name for name in evaluation.metrics() if "accuracy" in name or "_at_" in name}


def test_an_evaluation_without_scores_is_an_error() -> None:
    with pytest.raises(DataError, match="none of 2 samples could be scored"):
        _evaluator(None, None).evaluate()


def test_the_schedule_includes_the_start_and_the_end_and_can_be_empty() -> None:
    every_4 = EvaluationSchedule(4, num_steps=10)
    assert every_4.is_on
    assert [step for step in range(10) if every_4.is_due_after(step)] == [3, 7, 9]
    never = EvaluationSchedule(0, num_steps=10)
    assert not never.is_on and not any(never.is_due_after(step) for step in range(10))
