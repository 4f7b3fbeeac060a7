"""Scores finished samples: rewards of generated tasks here, all others in processes of their own, in bounded time.

    reward = sum of weight * part over the parts that are on (``parts.py``, in ``worker.py``)

A reward model runs on devices, beside all this: the controller adds its scores.

A sample whose scoring fails is never given a reward: it is dropped and counted, or it fails the run.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from hybridrl.config.choices import RewardFailure, TaskName
from hybridrl.config.schema import RewardConfig
from hybridrl.data.sample import Sample
from hybridrl.errors import DataError
from hybridrl.observability.heartbeat import HEARTBEAT, Identity
from hybridrl.rewards.function import RewardFunction, find_function
from hybridrl.rewards.parts import part_weights
from hybridrl.rewards.process import ScoringProcess
from hybridrl.rewards.request import score_request
from hybridrl.rewards.result import FailureKind, RewardResult, Score, ScoringFailure, collect_scores
from hybridrl.rewards.tasks import task_reward


class Scorer(Protocol):
    """Scores samples."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Score samples; blocks for a bounded time.

        Raises:
            DataError: When a sample cannot be scored and the configuration says that this fails the run.
        """
        ...

    def close(self) -> None:
        """End the scoring processes."""
        ...


def make_scorer(config: RewardConfig, task: TaskName, stop_texts: Sequence[str] = (), session: str = "") -> Scorer:
    """Return the scorer of a run.

    Args:
        stop_texts: The tokenizer's stop tokens as a response shows them.
        session: Of the run's heartbeats.

    Raises:
        ConfigError: When the reward function is not there.
        DataError: When a part of the reward cannot be set up.
    """
    built_in = task_reward(task)
    if built_in is not None:
        return BuiltInScorer(built_in)
    if not any(part_weights(config).values()):
        return NoRules()
    if config.function is not None:
        find_function(config.function)
    return ProcessScorer(config, stop_texts, session)


class BuiltInScorer:
    """Scores with a reward of our own; see :class:`Scorer`."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Score samples."""
        scores = [self._function(sample.text, sample.prompt.answer) for sample in samples]
        return collect_scores(samples, scores, RewardFailure.FAIL)

    def close(self) -> None:
        """Do nothing: there is no process."""


class NoRules:
    """Leaves the whole reward to a reward model; see :class:`Scorer`."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Give every sample 0, to which the model's score is added."""
        return replace(collect_scores(samples, [0.0] * len(samples), RewardFailure.FAIL), rule_rewards=None)

    def close(self) -> None:
        """Do nothing: there is no process."""


class ProcessScorer:
    """Scores in processes that are replaced when they hang or crash; see :class:`Scorer`."""

    def __init__(self, config: RewardConfig, stop_texts: Sequence[str], session: str = "") -> None:
        self._config = config
        self._stop_texts = tuple(stop_texts)
        self._session = session
        self._processes = [self._start(position) for position in range(config.num_processes)]
        try:
            self._await_ready()
        except DataError:
            self.close()
            raise

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        """Score samples, at most `timeout_s` for all and `sample_timeout_s` for each."""
        scores: dict[int, Score] = {}
        waiting = deque(range(len(samples)))
        deadline_s = time.monotonic() + self._config.timeout_s
        while len(scores) < len(samples) and time.monotonic() < deadline_s:
            for process in self._processes:
                if waiting and process.is_ready and process.index is None:
                    index = waiting.popleft()
                    request = score_request(samples[index], self._stop_texts)
                    process.submit(index, request, _name(samples[index]), self._config.sample_timeout_s)
            self._step(scores, deadline_s)
        message = f"not scored within reward.timeout_s = {self._config.timeout_s:g} s of the step"
        late = ScoringFailure(FailureKind.TIMEOUT, message)
        for position, process in enumerate(self._processes):
            if process.index is not None:
                self._replace(position)
        final = [scores.get(index, late) for index in range(len(samples))]
        return collect_scores(samples, final, self._config.on_error)

    def close(self) -> None:
        """End the scoring processes."""
        for process in self._processes:
            process.kill()
        self._processes.clear()

    def _step(self, scores: dict[int, Score], deadline_s: float) -> None:
        """Wait for the next replies, and replace processes that crashed or ran out of time."""
        ready = self._wait(deadline_s)
        for position, process in enumerate(self._processes):
            index = process.index
            if process in ready:
                was_ready, reply = process.is_ready, process.receive()
                if not was_ready and isinstance(reply, ScoringFailure):
                    raise self._load_error(reply)
                process.index = None
                if index is not None and reply is not None:
                    HEARTBEAT.advance()
                    scores[index] = reply
                if isinstance(reply, ScoringFailure) and reply.kind is FailureKind.CRASH:
                    self._replace(position)
            elif time.monotonic() >= process.deadline_s and (index is not None or not process.is_ready):
                if index is not None:
                    limit = f"no reward within reward.sample_timeout_s = {self._config.sample_timeout_s:g} s"
                    scores[index] = ScoringFailure(FailureKind.TIMEOUT, limit + process.place())
                self._replace(position)

    def _wait(self, deadline_s: float) -> list[ScoringProcess]:
        """Return the processes that replied or ended, at the latest when one is overdue."""
        busy = [process for process in self._processes if process.index is not None or not process.is_ready]
        until_s = min([deadline_s, *(process.deadline_s for process in busy)])
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process, selectors.EVENT_READ)
            events = selector.select(max(0.0, until_s - time.monotonic()))
        return [process for process in self._processes if any(key.fileobj is process for key, _ in events)]

    def _await_ready(self) -> None:
        deadline_s = time.monotonic() + self._config.timeout_s
        while not all(process.is_ready for process in self._processes):
            if time.monotonic() >= deadline_s:
                limit = f"reward.timeout_s = {self._config.timeout_s:g} s"
                raise DataError(f"{self._name} did not load within {limit}; raise it")
            self._step({}, deadline_s)

    def _start(self, position: int) -> ScoringProcess:
        return ScoringProcess(
            self._config, self._config.timeout_s, Identity(self._session, f"reward process {position}")
        )

    def _replace(self, position: int) -> None:
        self._processes[position].kill()
        self._processes[position] = self._start(position)

    def _load_error(self, failure: ScoringFailure) -> DataError:
        return DataError(f"{self._name} could not be loaded: {failure.message}")

    @property
    def _name(self) -> str:
        """The parts of the reward, as messages name them."""
        return (
            "reward"
            if self._config.function is None
            else f"reward.function: {self._config.function.rpartition(':')[0]}"
        )


def _name(sample: Sample) -> str:
    return f"sample {sample.sample_index} of prompt {sample.prompt.prompt_id}"
