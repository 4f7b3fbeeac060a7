"""Processes that get stuck: a training rank that sleeps while the other trains, and a sampler that is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from hybridrl.data.batch import PolicyBatch
from hybridrl.data.generation import SamplingSpec
from hybridrl.data.sample import Prompt, Sample
from hybridrl.roles.megatron_worker import MegatronWorker
from hybridrl.roles.rollout_replica import RolloutReplica
from tests.e2e.faulty_workers import STRUCK_FILE_VARIABLE

STUCK_RANK = 1
FOR_EVER_S = 3600
FIND_ENGINE_S = 10.0


class SleepsInUpdate(MegatronWorker):
    """Rank 1 never joins the first collective of an update."""

    def update(self, batch: PolicyBatch, loss: Any, temperature: float, want_logprobs: bool) -> Any:
        if self._rank == STUCK_RANK:
            Path(os.environ[STRUCK_FILE_VARIABLE]).touch()
            time.sleep(FOR_EVER_S)
        return super().update(batch, loss, temperature, want_logprobs)


class StopsItsSampler(RolloutReplica):
    """The replica's vLLM engine is stopped by SIGSTOP once it has samples to play."""

    async def generate(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: SamplingSpec, with_greedy: bool
    ) -> list[Sample]:
        deadline = time.monotonic() + FIND_ENGINE_S
        while not (engines := [each for each in psutil.Process().children(recursive=True) if _is_engine(each)]):
            assert time.monotonic() < deadline, "no vLLM engine below the replica"
            await asyncio.sleep(0.1)
        for engine in engines:
            engine.send_signal(signal.SIGSTOP)
        Path(os.environ[STRUCK_FILE_VARIABLE]).touch()
        return await super().generate(prompts, samples_per_prompt, sampling, with_greedy)


def _is_engine(process: psutil.Process) -> bool:
    return "VLLM::Engine" in " ".join(process.cmdline())
