"""The states of a rollout engine, on a hand-made front end of vLLM: no process is started."""

from __future__ import annotations

import asyncio
import types

import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, WeightVersionSpan
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from hybridrl.data.generation import SamplingSpec
from hybridrl.data.sample import FinishReason
from hybridrl.engines.vllm.engine import RolloutEngine
from hybridrl.engines.vllm.messages import Reply, encode
from hybridrl.errors import EngineError, EngineLostError, WeightSyncError

SAMPLING = SamplingSpec(1.0, 1.0, 8, (), None)


class FakeLlm:
    """Answers as AsyncLLM does; every flaw is a field."""

    def __init__(self) -> None:
        self.version = "0"
        self.finish_reason = "stop"
        self.logprob_tokens = [7, 8]
        self.does_reset = True
        self.is_dead = False
        self.errored = False
        self.fails = False
        self.never = False
        self.replies = [Reply(0, "report")]
        self.release = asyncio.Event()
        self.release.set()
        self.is_paused = False
        self.calls: list[str] = []

    async def generate(self, prompt, params, request_id):
        await self.release.wait()
        if self.is_dead:
            raise EngineDeadError
        if self.fails:
            raise EngineGenerateError
        flat = FlatLogprobs()
        flat.token_ids, flat.logprobs = list(self.logprob_tokens), [-0.5, -0.25]
        output = CompletionOutput(0, "", [7, 8], None, flat, finish_reason=self.finish_reason)
        output.weight_versions = [
            WeightVersionSpan(version, i, i + 1) for i, version in enumerate(self.version.split(","))
        ]
        yield types.SimpleNamespace(finished=True, outputs=[output])

    async def pause_generation(self, *, mode, clear_cache):
        assert (mode, clear_cache) == ("wait", True)
        self.is_paused = True

    async def resume_generation(self):
        if self.never:
            await asyncio.Event().wait()
        self.is_paused = False

    async def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        return self.does_reset

    async def update_weight_version(self, version):
        self.calls.append(f"version {version}")
        self.version = version

    async def collective_rpc(self, method, args):
        if self.is_dead:
            raise EngineDeadError
        if self.never:
            await asyncio.Event().wait()
        self.calls.append(method)
        return [encode(reply) for reply in self.replies]


def run(test) -> None:
    async def bounded() -> None:
        llm = FakeLlm()
        async with asyncio.timeout(5):
            await test(RolloutEngine(llm, 64), llm)

    asyncio.run(bounded())


async def receive(engine, version):
    return await engine.receive(version=version, verify=True, deadline_s=1.0)


def test_a_completion_carries_tokens_logprobs_and_version():
    async def test(engine, llm):
        completion = await engine.generate([1, 2], SAMPLING)
        assert completion.token_ids == (7, 8)
        assert completion.logprobs == (-0.5, -0.25)
        assert completion.finish_reason is FinishReason.STOP
        assert completion.policy_version == 0

    run(test)


def test_a_new_version_is_in_force_only_after_the_cache_was_dropped():
    async def test(engine, llm):
        await engine.pause(1.0)
        assert await receive(engine, 1) == ["report"]
        assert engine.policy_version == 0
        await engine.commit(1)
        assert llm.calls == ["hybridrl_receive", "reset_prefix_cache", "version 1"]
        await engine.resume()
        assert engine.policy_version == 1 and not llm.is_paused

    run(test)


def test_a_cache_that_vllm_keeps_prevents_the_commit():
    async def test(engine, llm):
        llm.does_reset = False
        await engine.pause(1.0)
        await receive(engine, 1)
        with pytest.raises(WeightSyncError, match="kept cached prefixes of version 0; version 1 is not committed"):
            await engine.commit(1)
        with pytest.raises(WeightSyncError, match="version 0 stays in force and nothing is sampled"):
            await engine.resume()

    run(test)


def test_a_failed_receive_can_only_be_followed_by_another():
    async def test(engine, llm):
        await engine.pause(1.0)
        llm.replies = [Reply(0, "report"), Reply(1, error="ReshardError: peer is gone")]
        with pytest.raises(EngineError, match="receive failed on 1 of 2 workers; worker 1: ReshardError: peer is gone"):
            await receive(engine, 1)
        with pytest.raises(WeightSyncError, match="commit of version 1 in state stale, last complete transfer None"):
            await engine.commit(1)
        llm.replies = [Reply(0, "report"), Reply(1, "report")]
        await receive(engine, 1)
        await engine.commit(1)
        assert engine.policy_version == 1

    run(test)


def test_a_second_receive_that_fails_withdraws_the_first():
    async def test(engine, llm):
        await engine.pause(1.0)
        await receive(engine, 1)
        llm.replies = [Reply(0, error="ReshardError: peer is gone")]
        with pytest.raises(EngineError):
            await receive(engine, 1)
        with pytest.raises(WeightSyncError, match="last complete transfer None"):
            await engine.commit(1)

    run(test)


def test_another_version_than_the_received_one_is_not_committed():
    async def test(engine, llm):
        await engine.pause(1.0)
        await receive(engine, 1)
        with pytest.raises(
            WeightSyncError, match="commit of version 2 in state stale, last complete transfer 1; version 0 stays"
        ):
            await engine.commit(2)

    run(test)


def test_pausing_twice_does_not_hide_a_stale_engine():
    async def test(engine, llm):
        await engine.pause(1.0)
        await receive(engine, 1)
        await engine.pause(1.0)
        with pytest.raises(WeightSyncError, match="not committed"):
            await engine.resume()

    run(test)


def test_a_pause_waits_for_running_completions_and_holds_new_ones():
    async def test(engine, llm):
        llm.release.clear()
        running = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(0)
        pausing = asyncio.create_task(engine.pause(1.0))
        await asyncio.sleep(0.01)
        held = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(0.01)
        assert not pausing.done() and engine.num_running == 1
        llm.release.set()
        await pausing
        assert running.done() and not held.done()
        await engine.resume()
        assert (await held).policy_version == 0

    run(test)


def test_a_pause_in_vain_says_how_many_completions_still_run():
    async def test(engine, llm):
        llm.release.clear()
        running = [asyncio.create_task(engine.generate([1], SAMPLING)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match=r"not still 0\.01 s after pause, 3 completions in flight; lower rollout"):
            await engine.pause(0.01)
        llm.release.set()
        await asyncio.gather(*running)
        assert not llm.is_paused

    run(test)


@pytest.mark.parametrize(
    ("flaw", "value", "message"),
    [
        ("version", "0,1", r"sampled by versions \['0', '1'\], expected 0"),
        ("version", "3", r"sampled by versions \['3'\], expected 0"),
        ("finish_reason", "abort", "ended with 'abort', expected stop or length"),
        ("logprob_tokens", [7, 9], "log-probs that do not belong to the sampled tokens"),
        ("is_dead", True, "generate found vLLM's engine process dead"),
    ],
)
def test_a_flawed_output_is_an_error_not_a_sample(flaw, value, message):
    async def test(engine, llm):
        setattr(llm, flaw, value)
        with pytest.raises(EngineError, match=message):
            await engine.generate([1], SAMPLING)
        assert engine.num_running == 0

    run(test)


def test_a_dead_engine_is_named_by_the_call_that_found_it():
    async def test(engine, llm):
        llm.is_dead = True
        with pytest.raises(EngineLostError, match="disconnect found vLLM's engine process dead"):
            await engine.disconnect()

    run(test)


def test_an_engine_that_dies_before_it_answers_is_not_waited_for():
    async def test(engine, llm):
        await engine.pause(1.0)
        llm.never = True
        receiving = asyncio.create_task(receive(engine, 1))
        await asyncio.sleep(0)
        llm.errored = True
        with pytest.raises(EngineLostError, match="receive found vLLM's engine process dead"):
            await receiving

    run(test)


def test_a_pause_in_vain_of_an_engine_that_died_is_not_waited_for():
    async def test(engine, llm):
        llm.release.clear()
        running = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(0)
        llm.never = llm.errored = True
        with pytest.raises(EngineLostError, match="resume found vLLM's engine process dead"):
            await engine.pause(0.01)
        running.cancel()

    run(test)


def test_a_request_that_fails_because_its_engine_died_is_a_lost_engine_and_otherwise_an_error():
    async def test(engine, llm):
        llm.fails = True
        with pytest.raises(EngineError, match="vLLM failed on a prompt of 1 tokens") as caught:
            await engine.generate([1], SAMPLING)
        assert not isinstance(caught.value, EngineLostError)
        llm.errored = True
        with pytest.raises(EngineLostError, match="generate found vLLM's engine process dead"):
            await engine.generate([1], SAMPLING)

    run(test)
