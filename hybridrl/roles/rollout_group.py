"""The rollout role as the controller sees it: prompts out to all replicas, samples back in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.config.schema import RolloutConfig, TrainerConfig
from hybridrl.data.generation import SamplingSpec
from hybridrl.data.sample import Prompt, Sample
from hybridrl.errors import EngineError
from hybridrl.layout.shard import ShardMap
from hybridrl.roles.deadline import inner_s
from hybridrl.roles.dispatch import broadcast, per_rank
from hybridrl.roles.future import Future, wait_for
from hybridrl.roles.group import RoleGroup
from hybridrl.roles.placement import Slot
from hybridrl.roles.resources import ResourcePool
from hybridrl.roles.rollout_replica import ROLE, RolloutLaunch, RolloutReplica

if TYPE_CHECKING:
    from hybridrl.reshard.executor import TransferReport
    from hybridrl.reshard.plan import Plan
    from hybridrl.reshard.transports import Rendezvous

_SHUTDOWN_TIMEOUT_S = 10.0


class RolloutReplicas:
    """All replicas; rank r of the role is replica r."""

    def __init__(
        self, pool: ResourcePool, slots: Sequence[Slot], launch: RolloutLaunch, *, timeouts: TrainerConfig
    ) -> None:
        actors = [pool.start_actor(RolloutReplica, slot, replica, launch) for replica, slot in enumerate(slots)]
        self._group = RoleGroup(ROLE, actors, range(len(actors)))
        self._num_replicas = len(actors)
        self._rollout: RolloutConfig = launch.rollout
        self._seed = launch.seed
        self._timeouts = timeouts

    def start(self) -> Future[list[ShardMap]]:
        """Start all replicas; the answer is where each worker keeps the weights, numbered through the replicas."""
        return self._group.call(
            "start", broadcast(), _concatenate, phase="start", timeout_s=self._timeouts.startup_timeout_s
        )

    def generate(self, prompts: Sequence[Prompt], samples_per_prompt: int) -> Future[list[Sample]]:
        """Play `samples_per_prompt` samples of each prompt; the answer is in the order of the prompts."""
        dealt = [list(prompts[replica :: self._num_replicas]) for replica in range(self._num_replicas)]
        sampling = SamplingSpec(
            self._rollout.temperature, self._rollout.top_p, self._rollout.max_response_tokens, (), self._seed
        )

        def combine(values: list[list[Sample]]) -> list[Sample]:
            groups: dict[str, list[Sample]] = {prompt.prompt_id: [] for prompt in prompts}
            for sample in _concatenate(values):
                groups[sample.prompt.prompt_id].append(sample)
            return _concatenate(list(groups.values()))

        return self._group.call(
            "generate",
            per_rank([(part, samples_per_prompt, sampling) for part in dealt]),
            combine,
            phase="rollout",
            timeout_s=self._timeouts.rollout_timeout_s,
        )

    def pause(self, timeout_s: float) -> Future[None]:
        """Let running completions finish and hold new ones."""
        return self._call("pause", inner_s(timeout_s), timeout_s=timeout_s)

    def resume(self, timeout_s: float) -> Future[None]:
        """Go on with the committed weights."""
        return self._call("resume", timeout_s=timeout_s)

    def connect_sync(self, rendezvous: Rendezvous, plan: Plan, *, timeout_s: float) -> Future[None]:
        """Connect every worker to the training ranks, which connect at the same time."""
        return self._call("connect_sync", rendezvous, plan, timeout_s=timeout_s)

    def receive_weights(self, version: int, *, verify: bool, timeout_s: float) -> Future[list[TransferReport]]:
        """Receive all weights as `version`; the answer is one report per worker, numbered through the replicas."""
        return self._group.call(
            "receive_weights",
            broadcast(version, verify, inner_s(timeout_s)),
            _concatenate,
            phase="weight_sync",
            timeout_s=timeout_s,
        )

    def commit(self, version: int, timeout_s: float) -> Future[None]:
        """Put the received weights in force on all replicas and drop every cached prefix."""
        return self._call("commit", version, timeout_s=timeout_s)

    def close(self) -> None:
        """Stop vLLM and end all replicas."""
        stopping = self._group.call("shutdown", broadcast(), _nothing, phase="shutdown", timeout_s=_SHUTDOWN_TIMEOUT_S)
        try:
            wait_for(stopping)
        except EngineError:
            return  # it was dead already, or is now: waiting kills the role when it fails
        self._group.kill()

    def _call(self, method: str, *arguments: Any, timeout_s: float) -> Future[None]:
        return self._group.call(method, broadcast(*arguments), _nothing, phase="weight_sync", timeout_s=timeout_s)


def _concatenate(parts: list[list[Any]]) -> list[Any]:
    return [entry for part in parts for entry in part]


def _nothing(values: list[Any]) -> None:
    return None
