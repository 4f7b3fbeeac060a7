"""The rollout role as the controller sees it: replicas that play prompts and take weights.

Replicas come and go (:meth:`RolloutReplicas.remove`, :meth:`RolloutReplicas.add`); each keeps its number, its slot and the ranks of its
workers, whoever else is there. After either, connect the weight sync again. Once all have started, one that dies is a replaceable rank
(``failure.py``), unless ``rollout.max_restarts`` is 0.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from hybridrl.config.schema import RolloutConfig, TrainerConfig
from hybridrl.data.generation import Completion, SamplingSpec
from hybridrl.data.sample import Prompt, Sample
from hybridrl.errors import EngineError
from hybridrl.layout.shard import ShardMap
from hybridrl.roles.deadline import inner_s
from hybridrl.roles.descendants import Descent
from hybridrl.roles.dispatch import broadcast, per_rank
from hybridrl.roles.future import Future, wait_for
from hybridrl.roles.group import Calls, RoleGroup
from hybridrl.roles.placement import Slot
from hybridrl.roles.resources import ResourcePool
from hybridrl.roles.rollout_replica import ROLE, RolloutLaunch, RolloutReplica

if TYPE_CHECKING:
    from hybridrl.reshard.executor import TransferReport
    from hybridrl.reshard.plan import Plan
    from hybridrl.reshard.transports import Rendezvous

_SHUTDOWN_TIMEOUT_S = 10.0


class RolloutReplicas:
    """All replicas that are there; errors call replica r rank r of the role."""

    def __init__(
        self,
        pool: ResourcePool,
        slots: Sequence[Slot],
        launch: RolloutLaunch,
        *,
        timeouts: TrainerConfig,
        calls: Calls | None = None,
    ) -> None:
        self._pool = pool
        self._slots = tuple(slots)
        self._launch = launch
        self._maps: dict[int, list[ShardMap]] = {}
        self._descents: dict[int, ray.ObjectRef[Descent]] = {}
        self._predecessors: defaultdict[int, list[Descent]] = defaultdict(list)
        self._calls = calls
        self._rollout: RolloutConfig = launch.rollout
        self._seed = launch.seed
        self._timeouts = timeouts
        self._actors = {replica: self._start_process(replica) for replica in range(len(slots))}
        self._group = self._grouped(self.replicas)

    def start(self) -> Future[list[ShardMap]]:
        """Start all replicas; the answer is where each worker keeps the weights, numbered through the replicas."""
        return self._start(self.replicas, is_joining=False)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Numbers of the replicas that are there."""
        return tuple(self._actors)

    @property
    def num_replicas(self) -> int:
        """Replicas that are there."""
        return len(self._actors)

    @property
    def shard_maps(self) -> list[ShardMap]:
        """Where each worker of the replicas that have started keeps the weights, in the order in which they answer."""
        return _concatenate([self._maps[replica] for replica in self._actors if replica in self._maps])

    def remove(self, replica: int) -> None:
        """Forget a replica, which may be dead already, and end it; :meth:`add` waits until its processes are gone."""
        ray.kill(self._actors.pop(replica))
        self._predecessors[replica] += _answered(self._descents.pop(replica))
        self._maps.pop(replica, None)
        self._group = self._grouped(self.replicas)

    def add(self, replica: int) -> Future[list[ShardMap]]:
        """Start a replica that was removed, on its old slot; it generates nothing until a weight sync was committed on it.

        Returns:
            Where its workers keep the weights.
        """
        assert replica not in self._actors, (replica, list(self._actors))
        self._actors = dict(sorted({**self._actors, replica: self._start_process(replica)}.items()))
        self._group = self._grouped(self.replicas)
        return self._start([replica], is_joining=True)

    def generate(
        self, replica: int, prompts: Sequence[Prompt], samples_per_prompt: int, *, with_greedy: bool = False
    ) -> Future[list[Sample]]:
        """Play `samples_per_prompt` samples of each prompt on a replica; those of a prompt are next to each other, in order.

        Args:
            with_greedy: Play one more sample of each prompt, greedily.
        """
        sampling = SamplingSpec(
            self._rollout.temperature, self._rollout.top_p, self._rollout.max_response_tokens, (), self._seed
        )
        return self._grouped([replica]).call(
            "generate",
            broadcast(list(prompts), samples_per_prompt, sampling, with_greedy),
            _concatenate,
            phase="rollout",
            timeout_s=self._timeouts.rollout_timeout_s,
        )

    def pause(self, timeout_s: float) -> Future[None]:
        """Let running completions finish and hold new ones."""
        return self._call("pause", inner_s(timeout_s), timeout_s=timeout_s)

    def resume(self, timeout_s: float) -> Future[None]:
        """Go on with the committed weights."""
        return self._call("resume", timeout_s=timeout_s)

    def connect_sync(self, rendezvous: Rendezvous, parts: Sequence[Plan], *, timeout_s: float) -> Future[None]:
        """Connect every worker to its part of a plan, while the training ranks connect to theirs."""
        size = self._rollout.tp_size
        arguments = [(rendezvous, parts[first : first + size]) for first in range(0, len(parts), size)]
        return self._group.call(
            "connect_sync", per_rank(arguments), _nothing, phase="connect_sync", timeout_s=timeout_s
        )

    def probe(self, token_ids: Sequence[int], num_tokens: int, timeout_s: float) -> Future[list[Completion]]:
        """Let every replica continue a prompt, as in training but over the whole distribution; one answer per replica."""
        sampling = SamplingSpec(self._rollout.temperature, 1.0, num_tokens, (), self._seed)
        return self._group.call(
            "probe", broadcast(tuple(token_ids), sampling), list, phase="probe", timeout_s=timeout_s
        )

    def receive_weights(self, version: int, *, verify: bool, timeout_s: float) -> Future[list[TransferReport]]:
        """Receive all weights as `version`; the answer is one report per worker, numbered through the replicas."""
        return self._group.call(
            "receive_weights",
            broadcast(version, verify, inner_s(timeout_s)),
            _concatenate,
            phase="receive_weights",
            timeout_s=timeout_s,
        )

    def commit(self, version: int, timeout_s: float) -> Future[None]:
        """Put the received weights in force on all replicas and drop every cached prefix."""
        return self._call("commit", version, timeout_s=timeout_s)

    def begin_profile(self, step: int) -> Future[None]:
        """Profile the workers that are profiled, as of a step."""
        return self._call("begin_profile", step, timeout_s=self._timeouts.rollout_timeout_s)

    def end_profile(self) -> Future[None]:
        """End the profiles."""
        return self._call("end_profile", timeout_s=self._timeouts.rollout_timeout_s)

    def close(self) -> None:
        """Stop vLLM and end all replicas."""
        stopping = self._group.call("shutdown", broadcast(), _nothing, phase="shutdown", timeout_s=_SHUTDOWN_TIMEOUT_S)
        with contextlib.suppress(EngineError):  # it was dead already, or is now
            wait_for(stopping)
        self._group.kill()

    def _call(self, method: str, *arguments: Any, timeout_s: float) -> Future[None]:
        return self._group.call(method, broadcast(*arguments), _nothing, phase=method, timeout_s=timeout_s)

    def _start_process(self, replica: int) -> ActorHandle[RolloutReplica]:
        slot, before = self._slots[replica], tuple(self._predecessors[replica])
        python = self._launch.python(replica)
        actor = self._pool.start_actor(RolloutReplica, slot, replica, self._launch, before, python=python)
        self._descents[replica] = actor.descent.remote()
        return actor

    def _start(self, replicas: Sequence[int], *, is_joining: bool) -> Future[list[ShardMap]]:
        def combine(values: list[list[ShardMap]]) -> list[ShardMap]:
            self._maps.update(zip(replicas, values, strict=True))
            for replica in replicas:  # its predecessors are gone: their numbers may be given to other processes
                self._predecessors.pop(replica, None)
            return _concatenate(values)

        group, timeout_s = self._grouped(replicas, is_replaceable=False), self._timeouts.startup_timeout_s
        return group.call("start", broadcast(is_joining), combine, phase="start", timeout_s=timeout_s)

    def _grouped(self, replicas: Sequence[int], *, is_replaceable: bool = True) -> RoleGroup:
        can_restart = is_replaceable and self._rollout.max_restarts > 0
        actors, dp_ranks = [self._actors[replica] for replica in replicas], range(len(replicas))
        return RoleGroup(ROLE, actors, dp_ranks, replicas, self._calls, is_replaceable=can_restart)


def _concatenate(parts: list[list[Any]]) -> list[Any]:
    return [entry for part in parts for entry in part]


def _answered(ref: ray.ObjectRef[Descent]) -> list[Descent]:
    """Return a replica's answer, if it lived to give one."""
    with contextlib.suppress(RayError):
        ready, _ = ray.wait([ref], timeout=0)
        return ray.get(ready)
    return []


def _nothing(values: list[Any]) -> None:
    return None
