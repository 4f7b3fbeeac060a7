"""Held-out evaluation: samples drawn as in training, with the same seeds at every evaluation, broken down by data source."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.controller.batches import rollout_record
from hybridrl.controller.interfaces import RolloutGroup, Scorer
from hybridrl.controller.pass_at_k import ks_up_to, majority_is_correct, pass_at_k
from hybridrl.data.batch import Floats
from hybridrl.data.sample import Prompt, Sample
from hybridrl.errors import DataError
from hybridrl.observability.records import RolloutRecord
from hybridrl.rewards.answers import final_answer
from hybridrl.roles.future import wait_for

_FULL_REWARD = 1.0


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The samples of one prompt that could be scored; at least one.

    Attributes:
        answers: Final answer of each sample, for majority votes.
        rewards: Rule-based reward of each sample.
    """

    data_source: str
    answers: tuple[str, ...]
    rewards: tuple[float, ...]

    @property
    def is_correct(self) -> list[bool]:
        """Whether the rules gave each sample at least 1."""
        return [reward >= _FULL_REWARD for reward in self.rewards]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome of one evaluation.

    Attributes:
        accuracy: Share of scored samples with a rule-based reward of at least 1; None where only a reward model scores,
            since its scale has no such mark.
        reward_mean: Mean reward of the scored samples.
        response_tokens_mean: Mean length, in tokens that the policy produced.
        num_dropped: Samples that could not be scored.
        of_samples: pass@k, mean@n and majority@n, over all prompts and by data source; by the rest of the metric's name;
            empty without an accuracy.
        samples: Every scored sample with its reward.
    """

    accuracy: float | None
    reward_mean: float
    response_tokens_mean: float
    num_dropped: int
    seconds: float
    of_samples: Mapping[str, float]
    samples: tuple[tuple[Sample, float], ...]

    def metrics(self) -> dict[str, float | int]:
        """Return the metrics under ``eval/``."""
        accuracy = {} if self.accuracy is None else {"eval/accuracy": self.accuracy}
        return {
            **accuracy,
            "eval/reward_mean": self.reward_mean,
            "eval/response_tokens_mean": self.response_tokens_mean,
            "eval/dropped": self.num_dropped,
            "eval/seconds": self.seconds,
        } | {f"eval/{name}": value for name, value in self.of_samples.items()}

    def records(self) -> list[RolloutRecord]:
        """Return the samples as what is written about rollouts; nothing was trained on them, so advantages are 0."""
        return [
            rollout_record(sample, reward, sample.rollout_logprobs, np.zeros(len(sample.token_ids), dtype=np.float32))
            for sample, reward in self.samples
        ]


class Evaluator:
    """Evaluates whatever policy version the replicas hold.

    Args:
        prompts: Held-out prompts.
        samples_per_prompt: The n of pass@k.
    """

    def __init__(
        self, rollout: RolloutGroup, scorer: Scorer, prompts: Sequence[Prompt], samples_per_prompt: int = 1
    ) -> None:
        self._rollout = rollout
        self._scorer = scorer
        self._prompts = list(prompts)
        self._samples_per_prompt = samples_per_prompt

    def evaluate(self) -> Evaluation:
        """Play and score the samples of every prompt.

        Raises:
            DataError: When not one sample could be scored.
        """
        started = time.perf_counter()
        samples = wait_for(self._rollout.generate(self._prompts, self._samples_per_prompt))
        result = self._scorer.score(samples)
        rewards = result.rewards[result.is_scored]
        if not len(rewards):
            raise DataError(f"evaluation: none of {len(samples)} samples could be scored; check the reward")
        lengths = np.array([sample.num_response_tokens for sample in samples])[result.is_scored]
        scored = [s for s, is_scored in zip(samples, result.is_scored, strict=True) if is_scored]
        accuracy, of_samples = None, dict[str, float]()
        if result.rule_rewards is not None:
            by_rules = result.rule_rewards[result.is_scored]
            accuracy = float((by_rules >= _FULL_REWARD).mean())
            of_samples = sample_metrics(scored_prompts(_paired(scored, by_rules)), self._samples_per_prompt)
        return Evaluation(
            accuracy=accuracy,
            reward_mean=float(rewards.mean()),
            response_tokens_mean=float(lengths.mean()),
            num_dropped=len(samples) - len(rewards),
            seconds=time.perf_counter() - started,
            of_samples=of_samples,
            samples=_paired(scored, rewards),
        )


def _paired(samples: Sequence[Sample], rewards: Floats) -> tuple[tuple[Sample, float], ...]:
    return tuple(zip(samples, (float(reward) for reward in rewards), strict=True))


def scored_prompts(samples: Sequence[tuple[Sample, float]]) -> list[ScoredPrompt]:
    """Gather the scored samples of each prompt, with their rule-based rewards."""
    of_prompt: dict[str, list[tuple[Sample, float]]] = {}
    for sample, reward in samples:
        of_prompt.setdefault(sample.prompt.prompt_id, []).append((sample, reward))
    return [
        ScoredPrompt(
            group[0][0].prompt.data_source,
            tuple(final_answer(sample.text) for sample, _ in group),
            tuple(reward for _, reward in group),
        )
        for group in of_prompt.values()
    ]


def sample_metrics(prompts: Sequence[ScoredPrompt], num_samples: int) -> dict[str, float]:
    """Return pass@k, mean@n and majority@n, over all prompts and, where there are several data sources, for each.

    With one sample per prompt they all equal the accuracy: over all prompts nothing is returned, and by source mean_at_1. A
    prompt with fewer than k scored samples is left out of pass@k.
    """
    metrics = _group_metrics(prompts, num_samples) if num_samples > 1 else {}
    sources = list(dict.fromkeys(prompt.data_source for prompt in prompts))
    if len(sources) > 1:
        for source in sources:
            of_source = [prompt for prompt in prompts if prompt.data_source == source]
            for name, value in _group_metrics(of_source, num_samples).items():
                metrics[f"{source or 'no_source'}/{name}"] = value
    return metrics


def _group_metrics(prompts: Sequence[ScoredPrompt], num_samples: int) -> dict[str, float]:
    metrics = {f"mean_at_{num_samples}": float(np.mean([np.mean(prompt.is_correct) for prompt in prompts]))}
    if num_samples == 1:
        return metrics
    votes = [majority_is_correct(prompt.answers, prompt.is_correct) for prompt in prompts]
    metrics[f"majority_at_{num_samples}"] = float(np.mean(votes))
    for k in ks_up_to(num_samples):
        full = [prompt.is_correct for prompt in prompts if len(prompt.rewards) >= k]
        if full:
            metrics[f"pass_at_{k}"] = float(np.mean([pass_at_k(len(each), sum(each), k) for each in full]))
    return metrics


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
