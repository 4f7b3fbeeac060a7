"""What scoring returns: a reward for each sample that could be scored, and an account of those that could not."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.choices import RewardFailure
from hybridrl.data.sample import Sample
from hybridrl.errors import DataError


class FailureKind(enum.Enum):
    """Why a sample has no reward."""

    EXCEPTION = "exception"
    WRONG_TYPE = "wrong_type"
    NOT_FINITE = "not_finite"
    TIMEOUT = "timeout"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class ScoringFailure:
    """A sample that could not be scored."""

    kind: FailureKind
    message: str


Score = float | ScoringFailure


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Rewards of a list of samples.

    Attributes:
        rewards: [num_samples] float32; 0 where is_scored is False, and then not to be used.
        is_scored: [num_samples] bool; a sample without a score must be dropped.
        num_failures: Samples without a score, by kind; kinds that did not occur count 0.
        rule_rewards: [num_samples] float32; the rewards without a reward model's share. None where only a model scores.
    """

    rewards: NDArray[np.float32]
    is_scored: NDArray[np.bool_]
    num_failures: Mapping[FailureKind, int]
    rule_rewards: NDArray[np.float32] | None


def collect_scores(samples: Sequence[Sample], scores: Sequence[Score], on_error: RewardFailure) -> RewardResult:
    """Turn scores into a result.

    Raises:
        DataError: When a sample has no score and `on_error` is FAIL; names the first one.
    """
    failures = [(s, score) for s, score in zip(samples, scores, strict=True) if isinstance(score, ScoringFailure)]
    if failures and on_error is RewardFailure.FAIL:
        raise DataError(_describe(failures, len(samples)))
    counts = Counter(failure.kind for _, failure in failures)
    rewards = np.array([0.0 if isinstance(s, ScoringFailure) else s for s in scores], dtype=np.float32)
    return RewardResult(
        rewards=rewards,
        is_scored=np.array([not isinstance(s, ScoringFailure) for s in scores], dtype=np.bool_),
        num_failures={kind: counts[kind] for kind in FailureKind},
        rule_rewards=rewards,
    )


def with_model(rules: RewardResult, model: RewardResult, weight: float) -> RewardResult:
    """Return rules + weight * model of the same samples; a sample without a score in one of them has none."""
    is_scored = rules.is_scored & model.is_scored
    return RewardResult(
        rewards=np.where(is_scored, rules.rewards + np.float32(weight) * model.rewards, np.float32(0)),
        is_scored=is_scored,
        num_failures={kind: rules.num_failures[kind] + model.num_failures[kind] for kind in FailureKind},
        rule_rewards=rules.rule_rewards,
    )


def _describe(failures: Sequence[tuple[Sample, ScoringFailure]], num_samples: int) -> str:
    sample, failure = failures[0]
    name = f"sample {sample.sample_index} of prompt {sample.prompt.prompt_id} ({sample.prompt.source})"
    return (
        f"reward: {len(failures)} of {num_samples} samples could not be scored; first {name}: "
        f"{failure.kind.value}: {failure.message}\ncorrect the reward function, or set reward.on_error=drop to drop "
        "and count such samples"
    )
