"""Rollouts that outlive their replicas: a dead replica is started again and synced, and its prompts are played again.

    prompts -> one call per living replica -> samples in the order of the prompts
                    |  a replica dies: its prompts are lost, what the others played is kept
    when samples are waited for, and in every weight sync:
        all calls end -> start the dead on their slots -> connect all -> sync the version in force (or the new one) -> play what was lost

waits for: calls by their own bound, starts by `trainer.startup_timeout_s`, the sync's phases by `weight_sync.timeout_s`.

Polling a rollout only takes note of a death, so an update beside it goes on: the actor is asked for its weights when it is in no call.

Invariants:
- What is played again is whole prompts, with the indices and thus the seeds of the first time: by the same version, the same samples.
- Lost prompts are played by the version in force after the repair. The actor may be one version ahead of them when the next weight
  sync is the first to see them lost; then they are played by that next version, which is less lag and never more.
- A version is in force on all replicas or on none, as in every weight sync: nothing is played before the sync returned.
- Only the death of a replica is made good, at most `max_restarts` times. An exception of an agent loop, a call that ran out of time or a training
  rank that failed ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridrl.controller.interfaces import ReplicaSet, ReplicaSync
from hybridrl.data.sample import Prompt, Sample
from hybridrl.errors import EngineError, RankLostError
from hybridrl.roles.failure import Failure, FailureKind, ReplaceableRankLostError, lost_ranks
from hybridrl.roles.future import Future, wait_all, wait_for

if TYPE_CHECKING:
    from hybridrl.controller.weight_sync import SyncReport


class RecoveringRollout:
    """Replicas and their weight sync, as the loop and evaluation see them.

    Args:
        max_restarts: ``rollout.max_restarts``.
        tell: Shows a line.
    """

    def __init__(
        self, replicas: ReplicaSet, weight_sync: ReplicaSync, max_restarts: int, tell: Callable[[str], None]
    ) -> None:
        self._replicas = replicas
        self._weight_sync = weight_sync
        self._max_restarts = max_restarts
        self._tell = tell
        self._version = 0
        self._calls: list[_Call] = []
        self._dead: dict[int, Failure] = {}
        self._restarts: list[Failure] = []

    @property
    def num_restarts(self) -> int:
        """Replicas that were started again so far."""
        return len(self._restarts)

    @property
    def living(self) -> list[int]:
        """Replicas that are not known to be dead."""
        return [replica for replica in self._replicas.replicas if replica not in self._dead]

    def generate(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, *, with_greedy: bool = False
    ) -> Future[list[Sample]]:
        """Play samples; see :class:`hybridrl.controller.interfaces.RolloutGroup`."""

        def play(replica: int, part: Sequence[Prompt]) -> Future[list[Sample]]:
            return self._replicas.generate(replica, part, samples_per_prompt, with_greedy=with_greedy)

        self._calls = [call for call in self._calls if not call.is_complete]
        self._calls.append(_Call(self, prompts, play))
        return self._calls[-1]

    def sync(self, version: int) -> SyncReport:
        """Bring the actor's weights into force as `version` on all replicas, the dead ones too, and play again what was lost.

        Call it while the actor is in no other call.

        Raises:
            WeightSyncError: Nothing was committed.
            EngineError: More replicas died than may, or something else failed.
        """
        wait_all(self._calls)
        started, num_restarts = time.perf_counter(), self.num_restarts
        while True:
            try:
                if self._dead:
                    self._restart_dead()
                report = self._weight_sync.sync(version)
                break
            except ReplaceableRankLostError as e:
                self.bury(e.failures)
        self._version = version
        for number, cause in enumerate(self._restarts[num_restarts:], num_restarts + 1):
            self._tell(
                f"{_described(cause)}; it is back with version {version}, {time.perf_counter() - started:.1f} s later "
                f"(restart {number} of {self._max_restarts})"
            )
        for call in self._calls:
            call.play_lost()
        return report

    def recover(self) -> None:
        """Bring the dead back and play what was lost, by the version in force; the actor must still have it."""
        self.sync(self._version)

    def bury(self, failures: Sequence[Failure]) -> None:
        """Take note of deaths; of a replica's, the first says why."""
        for failure in failures:
            self._dead.setdefault(failure.rank, failure)

    def _restart_dead(self) -> None:
        """Start the dead on their slots, all at once, until none is left, and connect."""
        while dead := dict(sorted(self._dead.items())):
            self._count(dead)
            for replica in dead:
                self._replicas.remove(replica)
            starting = {replica: self._replicas.add(replica) for replica in dead}
            self._dead = {}
            for start in starting.values():
                try:
                    wait_for(start)
                except EngineError:
                    self.bury(start.failures())
        self._weight_sync.connect(self._replicas.shard_maps)

    def _count(self, dead: dict[int, Failure]) -> None:
        for failure in dead.values():
            if self.num_restarts == self._max_restarts:
                before = "".join(f"\n  restart {n}: {_described(f)}" for n, f in enumerate(self._restarts, 1))
                raise RankLostError(
                    f"{_described(failure)}; its {self._max_restarts} restarts (rollout.max_restarts) are used up:{before}\n"
                    "Replicas that die this often have a cause of their own: look at the logs and the memory of their nodes. "
                    f"All that is known of the last one:\n{failure.text.strip()}"
                )
            self._restarts.append(failure)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one replica plays of a call."""

    prompts: Sequence[Prompt]
    samples: Future[list[Sample]]


class _Call:
    """The samples of some prompts; see :class:`hybridrl.roles.future.Future`. A replica that dies is no failure of it."""

    def __init__(
        self,
        rollout: RecoveringRollout,
        prompts: Sequence[Prompt],
        play: Callable[[int, Sequence[Prompt]], Future[list[Sample]]],
    ) -> None:
        self._rollout = rollout
        self._play = play
        self._of_prompt: dict[str, list[Sample]] = {prompt.prompt_id: [] for prompt in prompts}
        self._parts: list[_Part] = []
        self._pending: list[_Part] = []
        self._lost = list(prompts)
        self._failures: list[Failure] = []
        self.play_lost()

    @property
    def is_complete(self) -> bool:
        """Whether all samples are there, or never will be."""
        return not self._pending and not self._lost

    def play_lost(self) -> None:
        """Deal the prompts that nobody plays to the living replicas; without one, they stay lost."""
        living, prompts = self._rollout.living, self._lost
        for first, replica in enumerate(living):
            if part := prompts[first :: len(living)]:
                self._pending.append(_Part(part, self._play(replica, part)))
                self._parts.append(self._pending[-1])
        if living:
            self._lost = []

    def poll(self, wait_s: float) -> bool:
        """Take in what was played for at most `wait_s` seconds; return whether no replica plays on."""
        if self._pending:
            self._pending[0].samples.poll(wait_s)
        self._pending = [part for part in self._pending if not self._take(part)]
        return not self._pending

    def failures(self) -> Sequence[Failure]:
        """Return all failures but deaths of replicas."""
        return self._failures

    def value(self) -> list[Sample]:
        """Return the samples; those that are lost are played again first, while the actor must be in no call."""
        while self._lost:
            self._rollout.recover()
            wait_all([self])
        assert self.is_complete and not self._failures, (self._pending, self._failures)
        return [sample for samples in self._of_prompt.values() for sample in samples]

    def abandon(self) -> None:
        """End the replicas that played."""
        for part in self._parts:
            part.samples.abandon()

    def _take(self, part: _Part) -> bool:
        if not part.samples.poll(0.0):
            return False
        failures = part.samples.failures()
        if lost := lost_ranks(failures):
            self._lost += part.prompts
            self._rollout.bury(lost)
        elif failures:
            self._failures += failures
        else:
            for sample in part.samples.value():
                self._of_prompt[sample.prompt.prompt_id].append(sample)
        return True


def _described(failure: Failure) -> str:
    lines = failure.text.strip().splitlines()
    cause = lines[-1 if failure.kind is FailureKind.RAISED else 0]  # what was raised is the last line of a traceback
    return f"rollout replica {failure.rank} died in phase {failure.phase}: {cause}"
