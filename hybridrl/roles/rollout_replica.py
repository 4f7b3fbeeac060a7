"""One rollout replica as an async Ray actor: a vLLM engine and the agent loops that play on it.

All samples of one call run at once as tasks of one event loop; vLLM batches whatever they ask for. This module imports no
engine: vLLM reads its environment when it is first imported, so the engine is imported when it starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.config.choices import Platform, TaskName
from hybridrl.config.schema import RolloutConfig
from hybridrl.data.generation import Completion, SamplingSpec
from hybridrl.data.sample import Prompt, Sample
from hybridrl.engines.profiler import ProfileLaunch
from hybridrl.layout.shard import ShardMap
from hybridrl.observability.heartbeat import HEARTBEAT, Identity
from hybridrl.roles.descendants import Descent, end_descendants, lead_descendants
from hybridrl.roles.node import this_node

if TYPE_CHECKING:
    from hybridrl.reshard.executor import TransferReport
    from hybridrl.reshard.plan import Plan
    from hybridrl.reshard.transports import Rendezvous

ROLE = "rollout"


@dataclass(frozen=True, slots=True)
class RolloutLaunch:
    """What a replica needs to start.

    Attributes:
        folder: HF checkpoint to start from, with its tokenizer.
        task: Which agent loop plays.
        records_routing: Whether samples carry the experts of their tokens.
        session: Of the run's heartbeats.
        profile: What is profiled; None profiles nothing.
    """

    folder: Path
    rollout: RolloutConfig
    platform: Platform
    task: TaskName
    seed: int
    records_routing: bool = False
    session: str = ""
    profile: ProfileLaunch | None = None

    def first_rank(self, replica: int) -> int:
        """Return the rollout rank of a replica's worker 0; replicas number their workers through."""
        return replica * self.rollout.tp_size

    def python(self, replica: int) -> str | None:
        """Return the command that runs Python for a replica; None for the usual one."""
        first = self.first_rank(replica)
        is_profiled = self.profile and any(
            self.profile.covers(ROLE, first + rank) for rank in range(self.rollout.tp_size)
        )
        return self.profile.python(f"{ROLE}_replica_{replica:05d}") if self.profile and is_profiled else None


class RolloutReplica:
    """The methods that the role's group calls on every replica.

    Args:
        predecessors: Those that had this place before.
    """

    def __init__(self, replica: int, launch: RolloutLaunch, predecessors: Sequence[Descent] = ()) -> None:
        self._replica = replica
        self._launch = launch
        self._predecessors = tuple(predecessors)
        self._descent = lead_descendants(this_node())
        self._identity = Identity(launch.session, ROLE, replica)
        HEARTBEAT.show(self._identity)

    async def descent(self) -> Descent:
        """Return what this process and all that it will start are known by."""
        return self._descent

    async def start(self, is_joining: bool) -> list[ShardMap]:
        """Start vLLM with the checkpoint as version 0; return where each worker keeps the weights.

        Args:
            is_joining: Whether the others are past version 0, so that nothing may be generated before the first weight sync.
        """
        from hybridrl.agents import make_agent_loop
        from hybridrl.data.tokenizer import load_tokenizer
        from hybridrl.engines.vllm.engine import RolloutEngine
        from hybridrl.layout.families import read_model_spec

        launch = self._launch
        await asyncio.to_thread(end_descendants, self._predecessors, this_node())
        self._loop = make_agent_loop(launch.task, load_tokenizer(launch.folder))
        spec = read_model_spec(launch.folder)
        self._engine = await RolloutEngine.start(
            launch.folder,
            launch.rollout,
            launch.platform,
            launch.seed + self._replica,
            moe_layers=spec.moe_layers if launch.records_routing else (),
            identity=self._identity,
        )
        if is_joining:
            await self._engine.hold()
        return await self._engine.shard_maps(
            spec.tensors(),
            first_rank=launch.first_rank(self._replica),
            node=this_node(),
        )

    async def generate(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: SamplingSpec, with_greedy: bool
    ) -> list[Sample]:
        """Play every sample of every prompt; samples of a prompt are next to each other, in order, a greedy one last."""
        try:
            async with asyncio.TaskGroup() as tasks:
                played = [
                    tasks.create_task(self._play(prompt, index, sampling, is_greedy=index == samples_per_prompt))
                    for prompt in prompts
                    for index in range(samples_per_prompt + with_greedy)
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the others are cancelled, or fail of the same cause
        return [task.result() for task in played]

    async def _play(self, prompt: Prompt, index: int, sampling: SamplingSpec, *, is_greedy: bool) -> Sample:
        if not is_greedy:
            return await self._loop.run(prompt, index, self._engine, sampling)
        greedy = replace(sampling, temperature=0.0, top_p=1.0)
        return replace(await self._loop.run(prompt, index, self._engine, greedy), is_greedy=True)

    async def pause(self, timeout_s: float) -> None:
        """Let running completions finish and hold new ones."""
        await self._engine.pause(timeout_s)

    async def resume(self) -> None:
        """Go on with the committed weights."""
        await self._engine.resume()

    async def probe(self, token_ids: Sequence[int], sampling: SamplingSpec) -> Completion:
        """Continue a prompt, without an agent loop."""
        return await self._engine.generate(token_ids, sampling)

    async def connect_sync(self, rendezvous: Rendezvous, parts: Sequence[Plan]) -> None:
        """Connect every worker to its part of a plan, while the training ranks connect to theirs."""
        await self._engine.connect(rendezvous, parts)

    async def receive_weights(self, version: int, verify: bool, deadline_s: float) -> list[TransferReport]:
        """Receive all weights on every worker, as `version`; one report per worker."""
        return await self._engine.receive(version=version, verify=verify, deadline_s=deadline_s)

    async def commit(self, version: int) -> None:
        """Put the received weights in force and drop every cached prefix."""
        await self._engine.commit(version)

    async def begin_profile(self, step: int) -> None:
        """Profile the workers that are profiled, as of a step."""
        launch = self._launch
        await self._engine.begin_profile(launch.profile, step, first_rank=launch.first_rank(self._replica))

    async def end_profile(self) -> None:
        """End the profiles."""
        await self._engine.end_profile()

    async def shutdown(self) -> None:
        """Stop vLLM's processes."""
        self._engine.shutdown()
