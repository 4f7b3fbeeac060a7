"""Held-out evaluation: one sample per prompt, drawn as in training, with the same seeds at every evaluation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.controller.interfaces import RolloutGroup, Scorer
from hybridrl.data.sample import Prompt
from hybridrl.errors import DataError
from hybridrl.roles.future import wait_for


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome of one evaluation.

    Attributes:
        accuracy: Share of scored prompts whose sample earned a reward of at least 1.
        reward_mean: Mean reward.
        response_tokens_mean: Mean length, in tokens that the policy produced.
        num_dropped: Samples that could not be scored.
    """

    accuracy: float
    reward_mean: float
    response_tokens_mean: float
    num_dropped: int
    seconds: float

    def metrics(self) -> dict[str, float | int]:
        """Return the metrics under ``eval/``."""
        return {
            "eval/accuracy": self.accuracy,
            "eval/reward_mean": self.reward_mean,
            "eval/response_tokens_mean": self.response_tokens_mean,
            "eval/dropped": self.num_dropped,
            "eval/seconds": self.seconds,
        }


class Evaluator:
    """Evaluates whatever policy version the replicas hold.

    Args:
        prompts: Held-out prompts.
    """

    def __init__(self, rollout: RolloutGroup, scorer: Scorer, prompts: Sequence[Prompt]) -> None:
        self._rollout = rollout
        self._scorer = scorer
        self._prompts = list(prompts)

    def evaluate(self) -> Evaluation:
        """Play and score one sample of every prompt.

        Raises:
            DataError: When not one sample could be scored.
        """
        started = time.perf_counter()
        samples = wait_for(self._rollout.generate(self._prompts, 1))
        result = self._scorer.score(samples)
        rewards = result.rewards[result.is_scored]
        if not len(rewards):
            raise DataError(f"evaluation: none of {len(samples)} samples could be scored; check reward.function")
        lengths = np.array([sample.num_response_tokens for sample in samples])[result.is_scored]
        return Evaluation(
            accuracy=float((rewards >= 1.0).mean()),
            reward_mean=float(rewards.mean()),
            response_tokens_mean=float(lengths.mean()),
            num_dropped=len(samples) - len(rewards),
            seconds=time.perf_counter() - started,
        )


class EvaluationSchedule:
    """When to evaluate: before the first step, after every `every_steps` steps and after the last; never when it is 0.

    Args:
        every_steps: ``trainer.eval_every_steps``.
        num_steps: ``trainer.num_steps``.
    """

    def __init__(self, every_steps: int, num_steps: int) -> None:
        self._every_steps = every_steps
        self._num_steps = num_steps

    @property
    def is_on(self) -> bool:
        """Whether there are evaluations at all, hence one before training."""
        return self._every_steps > 0

    def is_due_after(self, step: int) -> bool:
        """Whether to evaluate after `step`, counted from 0."""
        return self.is_on and ((step + 1) % self._every_steps == 0 or step + 1 == self._num_steps)
