"""Fakes of everything that the controller sees: they keep a common diary of what was called in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from hybridrl.algos.algorithm import Credit
from hybridrl.checkpoint.folder import rank_file
from hybridrl.checkpoint.manifest import FileRecord, record_of
from hybridrl.config.choices import RewardFailure
from hybridrl.controller.batches import ScoredBatch
from hybridrl.controller.run_state import RunState
from hybridrl.controller.weight_sync import SyncReport
from hybridrl.data.batch import PolicyBatch, SequenceBatch, ValueBatch
from hybridrl.data.sample import FinishReason, Prompt, Sample
from hybridrl.data.stream import StreamState
from hybridrl.layout.roles import ModelRole
from hybridrl.observability.records import Metric, RolloutRecord
from hybridrl.rewards.result import FailureKind as ScoringKind
from hybridrl.rewards.result import RewardResult, ScoringFailure, collect_scores
from hybridrl.roles.failure import Failure, FailureKind
from hybridrl.roles.megatron_state import RoleSave

T = TypeVar("T")


class FakeFuture(Generic[T]):
    """A call that is done when it is polled, or that fails."""

    def __init__(self, answer: Callable[[], T], failures: Sequence[Failure] = ()) -> None:
        self._answer = answer
        self._found: list[Failure] = []
        self._failures = list(failures)
        self._result: list[T] = []
        self.is_abandoned = False

    def poll(self, wait_s: float) -> bool:
        if self._failures:
            self._found = self._failures
        elif not self._result:
            self._result.append(self._answer())
        return True

    def failures(self) -> Sequence[Failure]:
        return self._found

    def value(self) -> T:
        assert not self._found
        return self._result[0]

    def abandon(self) -> None:
        self.is_abandoned = True


def make_sample(
    prompt: Prompt, index: int, version: int, *, logprob: float = -1.0, num_tokens: int = 3, text: str = "ok"
) -> Sample:
    """Return a sample of 2 prompt tokens and `num_tokens` response tokens."""
    mask = np.array([False] * 2 + [True] * num_tokens)
    return Sample(
        prompt=prompt,
        sample_index=index,
        token_ids=np.arange(2 + num_tokens, dtype=np.int32) + 5,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(logprob), np.float32(0)).astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        finish_reason=FinishReason.STOP,
        num_turns=1,
        text=text,
    )


def make_prompt(name: str) -> Prompt:
    return Prompt(name, (5, 6), f"text of {name}", "answer", "test")


@dataclass
class FakePrompts:
    taken: int = 0

    @property
    def state(self) -> StreamState:
        return StreamState(self.taken, 0, 1)

    def take(self, num_prompts: int) -> list[Prompt]:
        self.taken += num_prompts
        return [make_prompt(f"p{self.taken - num_prompts + i}") for i in range(num_prompts)]


@dataclass
class FakeCheckpoints:
    """Keeps the state after every step."""

    states: list[RunState] = field(default_factory=list)
    is_last: list[bool] = field(default_factory=list)
    is_finished: bool = False

    def after_step(self, state: RunState, *, is_last: bool) -> None:
        self.states.append(state)
        self.is_last.append(is_last)

    def finish(self) -> None:
        self.is_finished = True


@dataclass
class FakeSavedModel:
    """Ranks that write one file each, and are done when `pending` polls have passed."""

    role: ModelRole = ModelRole.ACTOR
    num_ranks: int = 2
    pending: int = 0
    errors: tuple[str, ...] = ()
    damaged: frozenset[str] = frozenset()
    loaded: list[Path] = field(default_factory=list)
    files: dict[str, FileRecord] = field(default_factory=dict)

    def begin_save(self, folder: Path) -> FakeFuture[None]:
        def answer() -> None:
            self.files = {}
            for rank in range(self.num_ranks):
                name = rank_file(self.role.value, rank)
                (folder / name).write_text(f"rank {rank}")
                self.files[name] = record_of(folder / name)

        return FakeFuture(answer)

    def poll_save(self, wait_s: float) -> FakeFuture[RoleSave]:
        def answer() -> RoleSave:
            self.pending -= 1
            if self.pending >= 0:
                return RoleSave(False, {})
            return RoleSave(True, self.files, self.errors)

        return FakeFuture(answer)

    def damage_of(self, folder: Path, files: Mapping[str, FileRecord]) -> FakeFuture[list[str]]:
        return FakeFuture(lambda: [f"{folder}: bad"] if folder.name in self.damaged else [])

    def load_state(self, paths: Sequence[Path]) -> FakeFuture[None]:
        return FakeFuture(lambda: self.loaded.extend(paths))


@dataclass
class World:
    """A policy whose version goes up with each sync, and the diary."""

    diary: list[str] = field(default_factory=list)
    version: int = 0
    trainer_version: int = 0
    unfinished: int = 0
    logprob_gap: float = 0.0
    fail_update_at: int | None = None
    interrupt_update_at: int | None = None
    num_restarts: int = 0

    def generate(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, *, with_greedy: bool = False
    ) -> FakeFuture[list[Sample]]:
        kind = "eval" if samples_per_prompt == 1 else "rollout"
        started_at = self.version
        self.diary.append(f"start {kind} v{started_at}")
        self.unfinished += 1

        def answer() -> list[Sample]:
            self.unfinished -= 1
            assert self.version == started_at, "a rollout spans a weight sync"
            self.diary.append(f"finish {kind} v{started_at}")
            return [
                replace(make_sample(p, i, started_at), is_greedy=i == samples_per_prompt)
                for p in prompts
                for i in range(samples_per_prompt + with_greedy)
            ]

        return FakeFuture(answer)

    def logprobs(self, batch: SequenceBatch) -> FakeFuture[FakeLogprobs]:
        self.diary.append(f"old_logprobs v{self.trainer_version}")
        return FakeFuture(lambda: FakeLogprobs.constant(batch, -1.0 + self.logprob_gap))

    def update(self, batch: PolicyBatch, *, want_logprobs: bool = False) -> FakeFuture[FakeUpdate]:
        self.diary.append(f"update v{self.trainer_version}")
        if self.fail_update_at == self.trainer_version:
            return FakeFuture(FakeUpdate, [Failure("actor", 1, "update", FailureKind.RAISED, "ValueError: bad row")])

        def answer() -> FakeUpdate:
            if self.interrupt_update_at == self.trainer_version:
                raise KeyboardInterrupt
            self.last_batch = batch
            return FakeUpdate(logprobs=batch.old_logprobs if want_logprobs else None)

        return FakeFuture(answer)

    def sync(self, version: int) -> SyncReport:
        assert self.unfinished == 0, "a rollout is in flight during a weight sync"
        self.diary.append(f"sync v{version}")
        self.version = self.trainer_version = version
        return SyncReport(True, 100, 100, 0, 0.01, 0.001)


@dataclass
class FakeReference:
    """A reference that is a quarter of a nat off."""

    world: World

    def logprobs(self, batch: SequenceBatch) -> FakeFuture[FakeLogprobs]:
        self.world.diary.append("ref_logprobs")
        return FakeFuture(lambda: FakeLogprobs.constant(batch, -1.25))


@dataclass
class FakeCritic:
    """A critic whose value of the state after token t is t / 8."""

    world: World
    batches: list[ValueBatch] = field(default_factory=list)
    failures: Sequence[Failure] = ()

    def values(self, batch: SequenceBatch) -> FakeFuture[np.ndarray]:
        self.world.diary.append("values")
        rows, width = batch.token_ids.shape
        return FakeFuture(lambda: np.arange(width, dtype=np.float32)[None].repeat(rows, axis=0) / 8, self.failures)

    def update(self, batch: ValueBatch) -> FakeFuture[FakeValueUpdate]:
        self.world.diary.append(f"update values v{self.world.trainer_version}")
        self.batches.append(batch)
        return FakeFuture(FakeValueUpdate)


@dataclass(frozen=True)
class FakeLogprobs:
    logprobs: np.ndarray
    entropies: np.ndarray
    routing: np.ndarray | None = None

    @classmethod
    def constant(cls, batch: SequenceBatch, value: float) -> FakeLogprobs:
        shape = batch.token_ids.shape
        return cls(np.full(shape, value, dtype=np.float32), np.full(shape, 0.5, dtype=np.float32))


@dataclass(frozen=True)
class FakeUpdate:
    balance: None = None
    num_replayed: int = 0
    num_replay_changed: int = 0
    loss: float = 0.25
    grad_norm: float = 1.5
    entropy: float = 0.5
    lr: float = 1e-3
    approx_kl: float = 0.0
    clip_fraction: float = 0.0
    ref_kl: float = 0.0
    num_skipped: int = 0
    logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class FakeValueUpdate:
    loss: float = 0.125
    grad_norm: float = 2.5
    lr: float = 1e-2
    value_mean: float = 0.5
    return_mean: float = 0.5
    explained_variance: float = 0.75
    clip_fraction: float = 0.0
    num_skipped: int = 0


def make_rewards(rewards: Sequence[float | None]) -> RewardResult:
    """Return a result in which None could not be scored."""
    scores = [ScoringFailure(ScoringKind.EXCEPTION, "crashed") if reward is None else reward for reward in rewards]
    return collect_scores([make_sample(make_prompt("p"), 0, 0)] * len(scores), scores, RewardFailure.DROP)


class AlternatingScorer:
    """Rewards 1, 0, 1, 0, ...; drops the samples whose text is "crashed"."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return make_rewards([None if s.text == "crashed" else float(i % 2 == 0) for i, s in enumerate(samples)])


@dataclass
class FakeReplays:
    wanted: frozenset[int] = frozenset()
    recorded: list[tuple[int, int, bool]] = field(default_factory=list)

    def wants(self, step: int) -> bool:
        return step in self.wanted

    def record(
        self,
        step: int,
        batch: ScoredBatch,
        policy: PolicyBatch,
        credit: Credit,
        values: np.ndarray | None,
        updates: Sequence[FakeUpdate],
    ) -> None:
        self.recorded.append((step, len(batch.samples), all(update.logprobs is not None for update in updates)))


@dataclass
class FakeRecorder:
    steps: list[tuple[int, dict[str, Metric], list[RolloutRecord]]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, Metric]]] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    diary: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def status(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    def start_steps(self) -> None:
        pass

    def record_evaluation(
        self, version: int, metrics: Mapping[str, Metric], rollouts: Sequence[RolloutRecord] = ()
    ) -> None:
        self.diary.append(f"eval {version}")
        self.evaluations.append((version, dict(metrics)))

    def record_step(self, step: int, metrics: Mapping[str, Metric], rollouts: Sequence[RolloutRecord]) -> None:
        self.diary.append(f"step {step}")
        self.steps.append((step, dict(metrics), list(rollouts)))

    def close(self) -> Path:
        return Path("report.html")
