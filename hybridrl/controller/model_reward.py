"""Adds the scores of a reward model to those of the other parts of the reward.

    reward = sum of weight * part  +  reward.model.weight * value after the sample's last token

The model scores on its ranks while the other parts score in their processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridrl.config.schema import RewardConfig
from hybridrl.controller.batches import sequences_of
from hybridrl.controller.interfaces import RewardModelGroup, Scorer
from hybridrl.data.sample import Sample
from hybridrl.rewards.result import FailureKind, RewardResult, Score, ScoringFailure, collect_scores, with_model
from hybridrl.roles.future import wait_for


class ModelScorer:
    """See :class:`hybridrl.controller.interfaces.Scorer`.

    Args:
        others: The other parts of the reward.
    """

    def __init__(self, others: Scorer, model: RewardModelGroup, config: RewardConfig) -> None:
        self._others = others
        self._model = model
        self._weight = config.model.weight
        self._on_error = config.on_error

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Score samples.

        Raises:
            DataError: When a sample cannot be scored and the configuration says that this fails the run.
            EngineError: A rank failed; names role, rank and phase.
        """
        pending = self._model.rewards(sequences_of(samples))
        others = self._others.score(samples)
        scores: list[Score] = [_finite(float(score)) for score in wait_for(pending)]
        return with_model(others, collect_scores(samples, scores, self._on_error), self._weight)


def _finite(score: float) -> Score:
    if math.isfinite(score):
        return score
    return ScoringFailure(FailureKind.NOT_FINITE, f"the reward model returned {score}, expected a finite number")
