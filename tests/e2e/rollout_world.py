"""A rollout engine fed from checkpoint files by a sender in the test's own process: real vLLM, real plan, real transport."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridrl.config.choices import Platform, Precision
from hybridrl.config.schema import RolloutConfig
from hybridrl.data.generation import Completion
from hybridrl.engines.vllm.engine import RolloutEngine
from hybridrl.engines.vllm.learn import DTYPES
from hybridrl.layout.checkpoint import whole_shard_map
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.shard import LocalTensor, Place, ShardMap
from hybridrl.reshard.executor import Sender, TransferReport, compare_reports
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.planner import build_plan
from hybridrl.reshard.transports import Rendezvous, Transport, open_transport
from hybridrl.roles.ports import free_port

T = TypeVar("T")
Wrap = Callable[[Transport], Transport]


class World:
    """One engine, one source rank that holds whole tensors, and the event loop that drives both."""

    def __init__(self, runner: asyncio.Runner, engine: RolloutEngine, folder: Path, maps: Sequence[ShardMap]) -> None:
        self._runner = runner
        self.engine = engine
        self.folder = folder
        self.maps = maps
        self._canonical = read_model_spec(folder).tensors()
        self.version = engine.policy_version

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await work

        return self._runner.run(bounded())

    def transfer(
        self, folder: Path, version: int, wrap: Wrap = lambda transport: transport, chunk_bytes: int = 1 << 15
    ) -> list[str]:
        """Send a checkpoint to the paused engine; return the checksum mismatches."""
        tensors = {
            name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name in self._canonical
        }
        source = whole_shard_map(
            {name: LocalTensor(name, tuple(t.shape), DTYPES[t.dtype]) for name, t in tensors.items()},
            Place("actor", 0, "node", "actor-0"),
        )
        plan = build_plan([source], self.maps, chunk_bytes=chunk_bytes)
        meet = Rendezvous("shm", uuid.uuid4().hex[:12], "127.0.0.1", free_port("127.0.0.1"), 20.0)
        return self.run(self._transfer(plan, meet, tensors, version, wrap))

    async def _transfer(
        self, plan: Plan, meet: Rendezvous, tensors: dict[str, torch.Tensor], version: int, wrap: Wrap
    ) -> list[str]:
        def send() -> TransferReport:
            transport = wrap(open_transport(meet, plan, source=0))
            try:
                return Sender(plan, 0, transport).run(tensors, version, 20.0)
            finally:
                transport.close()

        sending = asyncio.create_task(asyncio.to_thread(send))
        await self.engine.connect(meet, [plan] * len(self.maps))
        try:
            received = await self.engine.receive(version=version, verify=True, deadline_s=20.0)
        finally:
            await self.engine.disconnect()
        return compare_reports(plan, [await sending], received)

    def update(self, folder: Path, chunk_bytes: int = 1 << 15) -> None:
        """Bring a checkpoint into force as the next version."""
        self.run(self.engine.pause(30.0))
        assert self.transfer(folder, self.version + 1, chunk_bytes=chunk_bytes) == []
        self.run(self.engine.commit(self.version + 1))
        self.run(self.engine.resume())
        self.version += 1


@contextmanager
def rollout_world(folder: Path, moe_layers: Sequence[int] = (), **settings: Any) -> Iterator[World]:
    """Start an engine on a tiny checkpoint, fp32 unless told otherwise; no process of it is left afterwards."""
    settings.setdefault("precision", Precision.FLOAT32)
    config = RolloutConfig(
        max_model_tokens=256,
        kv_cache_gib=1,
        max_running_samples=64,
        enforce_eager=True,
        **settings,
    )
    cores = [[rank] for rank in range(config.tp_size)] if config.tp_size > 1 else None
    with asyncio.Runner() as runner:
        engine = runner.run(RolloutEngine.start(folder, config, Platform.CPU, 1, moe_layers=moe_layers, cores=cores))
        try:
            maps = runner.run(engine.shard_maps(read_model_spec(folder).tensors(), first_rank=0, node="node"))
            yield World(runner, engine, folder, maps)
        finally:
            engine.shutdown()


def reference_logprobs(folder: Path, prompt: Sequence[int], completion: Completion, temperature: float) -> torch.Tensor:
    """Return transformers' log-prob of each sampled token under the tempered distribution."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([*prompt, *completion.token_ids])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]
