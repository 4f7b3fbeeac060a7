"""A reward model beside the other parts of the reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from hybridrl.config.choices import RewardFailure, TaskName
from hybridrl.config.schema import ModelRewardConfig, RewardConfig
from hybridrl.controller.model_reward import ModelScorer
from hybridrl.data.batch import SequenceBatch
from hybridrl.errors import DataError
from hybridrl.rewards.result import FailureKind
from hybridrl.rewards.score import make_scorer
from tests.unit.controller.fakes import AlternatingScorer, FakeFuture, make_prompt, make_sample

SAMPLES = [make_sample(make_prompt("p"), index, 0, num_tokens=1 + index) for index in range(3)]


@dataclass
class FakeModel:
    scores: Sequence[float] = (0.5, -1.0, 2.0)
    seen: SequenceBatch | None = None

    def rewards(self, batch: SequenceBatch) -> FakeFuture[np.ndarray]:
        self.seen = batch
        return FakeFuture(lambda: np.array(self.scores, dtype=np.float32))


def _config(on_error: RewardFailure = RewardFailure.FAIL) -> RewardConfig:
    return RewardConfig(model=ModelRewardConfig(weight=0.25, path="reward"), on_error=on_error)


def test_the_models_score_is_added_with_its_weight() -> None:
    model = FakeModel()
    result = ModelScorer(AlternatingScorer(), model, _config()).score(SAMPLES)
    assert result.rewards.tolist() == [1.125, -0.25, 1.5] and result.is_scored.all()
    assert model.seen is not None and model.seen.lengths.tolist() == [3, 4, 5]


def test_a_model_alone_is_the_whole_reward() -> None:
    others = make_scorer(_config(), TaskName.FILE)
    result = ModelScorer(others, FakeModel(), _config()).score(SAMPLES)
    assert result.rewards.tolist() == [0.125, -0.25, 0.5]


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_not_finite_drops_the_sample_or_fails_the_run(score: float) -> None:
    model = FakeModel((0.5, score, 2.0))
    result = ModelScorer(AlternatingScorer(), model, _config(RewardFailure.DROP)).score(SAMPLES)
    assert result.is_scored.tolist() == [True, False, True] and result.rewards.tolist() == [1.125, 0, 1.5]
    assert result.num_failures[FailureKind.NOT_FINITE] == 1
    with pytest.raises(
        DataError, match=r"first sample 1 of prompt p .*: not_finite: the reward model returned (nan|inf)"
    ):
        ModelScorer(AlternatingScorer(), model, _config()).score(SAMPLES)


def test_a_sample_that_another_part_cannot_score_stays_without_a_reward() -> None:
    samples = [SAMPLES[0], make_sample(make_prompt("p"), 1, 0, text="crashed"), SAMPLES[2]]
    result = ModelScorer(AlternatingScorer(), FakeModel(), _config()).score(samples)
    assert result.is_scored.tolist() == [True, False, True] and result.rewards[1] == 0
