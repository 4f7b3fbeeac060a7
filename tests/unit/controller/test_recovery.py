"""Replicas that die and come back, on fakes: what is played again, by which version, what is kept, and when the run ends after all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.choices import Platform
from hybridrl.config.schema import TrainerConfig, WeightSyncConfig
from hybridrl.controller.connection import Connector
from hybridrl.controller.evaluation import Evaluator
from hybridrl.controller.probe import Probe
from hybridrl.controller.recovery import RecoveringRollout
from hybridrl.controller.trainer import Trainer
from hybridrl.controller.weight_sync import WeightSyncer
from hybridrl.data.batch import SequenceBatch
from hybridrl.data.generation import Completion
from hybridrl.data.sample import FinishReason, Prompt, Sample
from hybridrl.errors import EngineError
from hybridrl.layout.box import Box, DType
from hybridrl.layout.shard import CanonicalTensor, LocalTensor, Place, Shard, ShardMap
from hybridrl.reshard.executor import PieceKey, TransferReport
from hybridrl.roles.failure import Failure, FailureKind
from hybridrl.roles.future import wait_all, wait_for
from tests.unit.controller.fakes import (
    AlternatingScorer,
    FakeCheckpoints,
    FakeFuture,
    FakeLogprobs,
    FakePrompts,
    FakeRecorder,
    World,
    make_prompt,
    make_sample,
)

T = TypeVar("T")
NAME = "model.norm.weight"
PROMPTS = [make_prompt(f"p{i}") for i in range(4)]
SYNC_PHASES = ("pause", "receive_weights", "commit", "resume", "probe")
STARTING = -1


def _map(role: str, rank: int) -> ShardMap:
    shard = Shard(NAME, Box((0,), (8,)), "w", 0, (1,))
    tensors = {"w": LocalTensor("w", (8,), DType.FLOAT32)}
    return ShardMap(Place(role, rank, "host", f"{role}:{rank}"), tensors, (shard,), {NAME: CanonicalTensor(NAME, (8,))})


@dataclass
class Stack:
    """Replicas and one training rank: every replica has a version or is starting, and dies in the phases of `doom`.

    The first replica that plays `deadly_prompt` dies of it.
    """

    num_slots: int = 2
    doom: list[tuple[str, int]] = field(default_factory=list)
    deadly_prompt: str = ""
    kind: FailureKind = FailureKind.DIED
    actor_dies: bool = False
    diary: list[str] = field(default_factory=list)
    futures: list[FakeFuture] = field(default_factory=list)
    dp_size: int = 1

    def __post_init__(self) -> None:
        self.versions = dict.fromkeys(range(self.num_slots), 0)
        self.dead: set[int] = set()
        self.received: dict[int, int] = {}

    def _call(
        self, phase: str, answer: Callable[[], T], replicas: Sequence[int] | None = None, role: str = "rollout"
    ) -> FakeFuture[T]:
        failures = []
        for replica in self.replicas if replicas is None else replicas:
            if (phase, replica) in self.doom:
                self.doom.remove((phase, replica))
                self.dead.add(replica)
            if replica in self.dead:
                is_replaceable = self.kind is FailureKind.DIED and phase != "start"
                failures.append(Failure("rollout", replica, phase, self.kind, "it is gone", is_replaceable))
        self.futures.append(FakeFuture(answer, failures))
        return self.futures[-1]

    # The replicas.

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(sorted(self.versions))

    @property
    def num_replicas(self) -> int:
        return len(self.versions)

    @property
    def shard_maps(self) -> list[ShardMap]:
        return [_map("rollout", replica) for replica in self.replicas]

    def generate(
        self, replica: int, prompts: Sequence[Prompt], samples_per_prompt: int, *, with_greedy: bool = False
    ) -> FakeFuture[list[Sample]]:
        version = self.versions[replica]
        assert version != STARTING, "a replica generates before its first commit"
        self.diary.append(f"{replica} plays {' '.join(prompt.prompt_id for prompt in prompts)} v{version}")

        if any(prompt.prompt_id == self.deadly_prompt for prompt in prompts):
            self.deadly_prompt = ""
            self.doom.append(("rollout", replica))

        def answer() -> list[Sample]:
            return [make_sample(prompt, i, version) for prompt in prompts for i in range(samples_per_prompt)]

        return self._call("rollout", answer, [replica])

    def remove(self, replica: int) -> None:
        self.diary.append(f"remove {replica}")
        del self.versions[replica]

    def add(self, replica: int) -> FakeFuture[list[ShardMap]]:
        self.diary.append(f"add {replica}")
        self.versions[replica] = STARTING
        self.dead.discard(replica)
        return self._call("start", lambda: [_map("rollout", replica)], [replica])

    # Both sides of the weight sync.

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def connect_sync(
        self, rendezvous: object, parts: object, *, timeout_s: float, verify: bool | None = None
    ) -> object:
        if verify is not None:  # the actor
            return FakeFuture(lambda: None)
        self.diary.append(f"connect {self.num_replicas}")
        return self._call("connect_sync", lambda: None)

    def pause(self, timeout_s: float) -> FakeFuture[None]:
        return self._call("pause", lambda: None)

    def send_weights(self, version: int, timeout_s: float) -> FakeFuture[list[TransferReport]]:
        keys = [PieceKey(NAME, 0, destination) for destination in range(self.num_replicas)]
        is_cut = any(phase == "receive_weights" for phase, _ in self.doom)  # asked before the replicas are
        kind = FailureKind.DIED if self.actor_dies else FailureKind.CONNECTION
        failures = [Failure("actor", 0, "send_weights", kind, "timed out until")] if is_cut else []
        self.futures.append(FakeFuture(lambda: [_report(keys)], failures))
        return self.futures[-1]

    def receive_weights(self, version: int, *, verify: bool, timeout_s: float) -> FakeFuture[list[TransferReport]]:
        self.diary.append(f"receive v{version}")
        reports = [_report([PieceKey(NAME, 0, destination)]) for destination in range(self.num_replicas)]
        return self._call("receive_weights", lambda: reports)

    def commit(self, version: int, timeout_s: float) -> FakeFuture[None]:
        def answer() -> None:
            self.versions = dict.fromkeys(self.versions, version)

        return self._call("commit", answer)

    def resume(self, timeout_s: float) -> FakeFuture[None]:
        return self._call("resume", lambda: None)

    def probe(self, token_ids: object, num_tokens: int, timeout_s: float) -> FakeFuture[list[Completion]]:
        completions = [Completion((7, 8), (-1.0, -1.0), FinishReason.LENGTH, 0)] * self.num_replicas
        return self._call("probe", lambda: completions)

    def logprobs(self, batch: SequenceBatch) -> FakeFuture[FakeLogprobs]:
        return FakeFuture(lambda: FakeLogprobs.constant(batch, -1.0))


def _report(keys: Sequence[PieceKey]) -> TransferReport:
    return TransferReport(dict.fromkeys(keys, 7), 32, {"copy": 0.0, "checksum": 0.0, "total": 0.0})


def _rollout(stack: Stack, max_restarts: int = 3, said: list[str] | None = None) -> RecoveringRollout:
    config = WeightSyncConfig(probe_every=1)
    connector = Connector(stack, stack, [_map("actor", 0)], config, Platform.CPU, "session")
    syncer = WeightSyncer(stack, stack, connector, config, Probe((5, 6), 0.25))
    syncer.connect(stack.shard_maps)
    stack.diary.clear()
    return RecoveringRollout(stack, syncer, max_restarts, (said if said is not None else []).append)


def _names(samples: Sequence[Sample]) -> list[tuple[str, int, int]]:
    return [(s.prompt.prompt_id, s.sample_index, int(s.policy_versions.max())) for s in samples]


def _expected(version: int, samples_per_prompt: int = 2) -> list[tuple[str, int, int]]:
    return [(prompt.prompt_id, i, version) for prompt in PROMPTS for i in range(samples_per_prompt)]


def test_prompts_of_a_dead_replica_are_played_again_by_the_version_in_force_and_those_of_others_are_kept() -> None:
    said: list[str] = []
    stack = Stack(doom=[("rollout", 1)])
    rollout = _rollout(stack, said=said)
    rollout.sync(5)
    stack.diary.clear()
    assert _names(wait_for(rollout.generate(PROMPTS, 2))) == _expected(5)
    assert stack.diary == [
        "0 plays p0 p2 v5", "1 plays p1 p3 v5", "remove 1", "add 1", "connect 2", "receive v5", "0 plays p1 v5", "1 plays p3 v5",
    ]  # fmt: skip
    assert rollout.num_restarts == 1
    assert said[0].startswith("rollout replica 1 died in phase rollout: it is gone; it is back with version 5, ")
    assert said[0].endswith("s later (restart 1 of 3)")
    assert not any(future.is_abandoned for future in stack.futures)


def test_a_replica_that_dies_in_an_evaluation_changes_nothing_of_its_outcome() -> None:
    outcomes = [
        Evaluator(_rollout(Stack(doom=doom)), AlternatingScorer(), PROMPTS, 2).evaluate()
        for doom in ([], [("rollout", 0)])
    ]
    undisturbed, disturbed = ([(*_names([s]), reward) for s, reward in outcome.samples] for outcome in outcomes)
    assert disturbed == undisturbed


def test_a_death_beside_an_update_ends_nothing_and_the_next_sync_makes_it_good_with_the_new_version() -> None:
    stack = Stack(doom=[("rollout", 1)])
    rollout = _rollout(stack)
    call = rollout.generate(PROMPTS, 2)
    assert wait_for(FakeFuture(lambda: "updated"), beside=[call]) == "updated"
    wait_all([call])
    assert stack.diary == ["0 plays p0 p2 v0", "1 plays p1 p3 v0"], "repaired while the actor may be in a call"
    rollout.sync(1)
    assert stack.diary[2:] == ["remove 1", "add 1", "connect 2", "receive v1", "0 plays p1 v1", "1 plays p3 v1"]
    versions = {name: version for name, _, version in _names(wait_for(call))}
    assert versions == {"p0": 0, "p1": 1, "p2": 0, "p3": 1}
    assert stack.diary.count("receive v0") == 0


def test_with_lag_1_a_loop_that_loses_a_replica_trains_every_prompt_once_within_its_lag() -> None:
    stack, recorder, world = Stack(doom=[("rollout", 1)]), FakeRecorder(), World()
    rollout = _rollout(stack)
    Trainer(
        TrainerConfig(num_steps=4, eval_every_steps=0, max_policy_lag=1),
        AlgorithmConfig(prompts_per_step=2, samples_per_prompt=2),
        actor=world,
        rollout=rollout,
        weight_sync=rollout,
        prompts=FakePrompts(),
        scorer=AlternatingScorer(),
        evaluator=Evaluator(rollout, AlternatingScorer(), PROMPTS),
        recorder=recorder,
    ).run()
    assert [metrics["lag/max"] for _, metrics, _ in recorder.steps] == [0, 1, 1, 1]
    assert [metrics["rollout/restarts"] for _, metrics, _ in recorder.steps] == [1] * 4
    trained = [(r.prompt_id, r.sample_index) for _, _, records in recorder.steps for r in records]
    assert sorted(trained) == sorted((f"p{i}", j) for i in range(8) for j in range(2))


def test_a_checkpoint_after_a_repair_holds_the_samples_that_were_played_again() -> None:
    stack, checkpoints = Stack(deadly_prompt="p3"), FakeCheckpoints()
    rollout = _rollout(stack)
    Trainer(
        TrainerConfig(num_steps=3, eval_every_steps=0, max_policy_lag=1),
        AlgorithmConfig(prompts_per_step=2, samples_per_prompt=2),
        actor=World(),
        rollout=rollout,
        weight_sync=rollout,
        prompts=FakePrompts(),
        scorer=AlternatingScorer(),
        evaluator=Evaluator(rollout, AlternatingScorer(), PROMPTS),
        recorder=FakeRecorder(),
        checkpoints=checkpoints,
    ).run()
    waiting = [[_names(samples) for samples in state.waiting] for state in checkpoints.states]
    assert [entry for entry in stack.diary if "plays p3" in entry] == ["1 plays p3 v0", "0 plays p3 v1"]
    assert waiting[0] == [[("p2", 0, 0), ("p2", 1, 0), ("p3", 0, 1), ("p3", 1, 1)]]


@pytest.mark.parametrize("phase", SYNC_PHASES)
def test_a_replica_that_dies_in_a_phase_of_the_sync_is_replaced_and_the_same_version_is_synced_to_all(
    phase: str,
) -> None:
    stack = Stack(doom=[(phase, 1)])
    rollout = _rollout(stack)
    assert rollout.sync(1).wire_bytes == 64
    repaired = ["remove 1", "add 1", "connect 2", "receive v1"]
    assert stack.diary == (repaired if phase == "pause" else ["receive v1", *repaired])
    assert stack.versions == {0: 1, 1: 1} and rollout.num_restarts == 1
    assert not any(future.is_abandoned for future in stack.futures), "a whole rank was ended"
    assert _names(wait_for(rollout.generate(PROMPTS, 2))) == _expected(1)


@pytest.mark.parametrize(
    "second", [("start", 1), ("connect_sync", 1), ("connect_sync", 0), ("commit", 0), ("rollout", 0)]
)
def test_a_second_death_while_the_first_is_made_good_is_made_good_too(second: tuple[str, int]) -> None:
    stack = Stack()
    rollout = _rollout(stack)
    call = rollout.generate(PROMPTS, 2)
    call.poll(0.0)
    stack.doom += [("rollout", 1), second]
    assert _names(wait_for(rollout.generate(PROMPTS, 2))) == _names(wait_for(call)) == _expected(0)
    assert rollout.num_restarts == 2 and not stack.doom


def test_when_all_replicas_are_dead_everything_is_played_again() -> None:
    stack = Stack(doom=[("rollout", 0), ("rollout", 1)])
    assert _names(wait_for(_rollout(stack).generate(PROMPTS, 2))) == _expected(0)
    assert stack.diary[2:] == [
        "remove 0", "remove 1", "add 0", "add 1", "connect 2", "receive v0", "0 plays p0 p1 v0", "1 plays p2 p3 v0",
    ]  # fmt: skip


def test_a_replica_known_to_be_dead_is_dealt_no_more_prompts_and_counted_once() -> None:
    stack = Stack(doom=[("rollout", 1)])
    rollout = _rollout(stack)
    first = rollout.generate(PROMPTS, 2)
    wait_all([first])
    second = rollout.generate(PROMPTS, 2)
    assert stack.diary[-1] == "0 plays p0 p1 p2 p3 v0"
    assert _names(wait_for(second)) == _names(wait_for(first)) == _expected(0)
    assert rollout.num_restarts == 1


def test_deaths_beyond_the_budget_end_the_run_with_every_cause() -> None:
    stack = Stack(doom=[("rollout", 1), ("start", 1), ("commit", 0)])
    with pytest.raises(EngineError) as caught:
        wait_for(_rollout(stack, max_restarts=2).generate(PROMPTS, 2))
    message = str(caught.value)
    assert message.startswith(
        "rollout replica 0 died in phase commit: it is gone; its 2 restarts (rollout.max_restarts)"
    )
    assert "restart 1: rollout replica 1 died in phase rollout" in message
    assert "restart 2: rollout replica 1 died in phase start: it is gone\n" in message


@pytest.mark.parametrize(("kind", "verb"), [(FailureKind.RAISED, "failed"), (FailureKind.TIMED_OUT, "no answer")])
def test_an_exception_or_a_silence_of_a_replica_is_no_death_and_ends_the_run(kind: FailureKind, verb: str) -> None:
    stack = Stack(doom=[("rollout", 1)], kind=kind)
    rollout = _rollout(stack)
    with pytest.raises(EngineError, match=rf"^rollout rank 1.*{verb}"):
        wait_for(rollout.generate(PROMPTS, 2))
    assert rollout.num_restarts == 0 and stack.diary == ["0 plays p0 p2 v0", "1 plays p1 p3 v0"]
    assert all(future.is_abandoned for future in stack.futures[-2:])


def test_a_training_rank_that_dies_with_a_replica_ends_the_run() -> None:
    stack = Stack(doom=[("receive_weights", 1)], actor_dies=True)
    rollout = _rollout(stack)
    with pytest.raises(EngineError, match="actor rank 0 died in phase send_weights"):
        rollout.sync(1)
    assert rollout.num_restarts == 0 and stack.versions == {0: 0, 1: 0}
