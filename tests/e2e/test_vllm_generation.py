"""Generation with a live vLLM engine: stop tokens, limits, aborts, pauses, and equal results at equal seeds and degrees."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hybridrl.data.generation import Completion, SamplingSpec
from hybridrl.data.sample import FinishReason
from hybridrl.errors import EngineError
from tests.e2e.rollout_world import rollout_world
from tests.e2e.tiny_models import save_qwen3_moe
from tests.processes import still_running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = list(range(3, 40))


def sampling(temperature=1.0, max_tokens=24, stop=(), seed=None, top_p=1.0):
    return SamplingSpec(temperature, top_p, max_tokens, tuple(stop), seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_qwen3_moe(tmp_path_factory.mktemp("moe"), 1)


@pytest.fixture(scope="module")
def world(folder):
    with rollout_world(folder) as running:
        yield running


@pytest.fixture(scope="module")
def greedy(world):
    return world.run(world.engine.generate(PROMPT, sampling(0.0, 64)))


def test_a_completion_ends_at_its_limit(greedy):
    assert len(greedy.token_ids) == len(greedy.logprobs) == 64
    assert greedy.finish_reason is FinishReason.LENGTH


def test_the_stop_token_is_part_of_the_completion(world, greedy):
    stop = greedy.token_ids[10]
    first = greedy.token_ids.index(stop)
    completion = world.run(world.engine.generate(PROMPT, sampling(0.0, 64, stop=[stop])))
    assert completion.token_ids == greedy.token_ids[: first + 1]
    assert len(completion.logprobs) == first + 1
    assert completion.finish_reason is FinishReason.STOP


def test_the_end_token_of_the_checkpoint_does_not_stop_by_itself(world):
    """config.json names token 2; only the request decides what stops it."""

    async def many() -> list[Completion]:
        return await asyncio.gather(*(world.engine.generate(PROMPT, sampling(2.0, 200, seed=i)) for i in range(16)))

    completions = world.run(many())
    assert all(completion.finish_reason is FinishReason.LENGTH for completion in completions)
    assert any(2 in completion.token_ids[:-1] for completion in completions)


def test_a_temperature_beyond_what_vllm_samples_is_refused(world):
    with pytest.raises(
        EngineError, match=r"vLLM refuses SamplingSpec\(temperature=5.0.*temperature must be in \[0, 2\]"
    ):
        world.run(world.engine.generate(PROMPT, sampling(5.0)))


def test_equal_seeds_give_equal_completions_in_any_company(world):
    async def crowd(num: int):
        tasks = [world.engine.generate(PROMPT[: 5 + i % 20], sampling(seed=i)) for i in range(num)]
        alone = world.engine.generate(PROMPT, sampling(seed=11))
        return (await asyncio.gather(alone, *tasks))[0].token_ids

    assert world.run(crowd(0)) == world.run(crowd(40))


def test_a_response_never_exceeds_the_model_length(world):
    completion = world.run(world.engine.generate([3] * 250, sampling(max_tokens=50)))
    assert len(completion.token_ids) == 6
    assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [0, 256])
def test_a_prompt_that_leaves_no_room_is_refused(world, length):
    with pytest.raises(
        EngineError, match=rf"prompt of {length} tokens, expected 1 to 255 \(rollout.max_model_tokens less one\)"
    ):
        world.run(world.engine.generate([3] * length, sampling()))


def test_cancelling_aborts_the_request(world):
    async def cancel_one() -> None:
        task = asyncio.create_task(world.engine.generate(PROMPT, sampling(max_tokens=200)))
        await asyncio.sleep(0.02)
        assert world.engine.num_running == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.engine.num_running == 0
        await world.engine.pause(2.0)
        await world.engine.resume()

    world.run(cancel_one())


def test_a_pause_lets_running_completions_finish_and_holds_new_ones(world):
    async def pause_and_resume() -> None:
        running = asyncio.create_task(world.engine.generate(PROMPT, sampling(max_tokens=100)))
        await asyncio.sleep(0.01)
        await world.engine.pause(30.0)
        assert running.done() and len(running.result().token_ids) == 100
        held = asyncio.create_task(world.engine.generate(PROMPT, sampling()))
        await asyncio.sleep(0.1)
        assert not held.done() and world.engine.num_running == 0
        await world.engine.resume()
        assert len((await held).token_ids) == 24

    world.run(pause_and_resume())


def test_a_pause_that_takes_too_long_leaves_the_engine_running(world):
    async def pause_briefly() -> None:
        running = asyncio.create_task(world.engine.generate(PROMPT, sampling(max_tokens=200)))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=r"not still 0\.001 s after pause, 1 completions in flight"):
            await world.engine.pause(0.001)
        assert len((await running).token_ids) == 200
        assert len((await world.engine.generate(PROMPT, sampling())).token_ids) == 24

    world.run(pause_briefly())


def test_tensor_parallel_workers_give_the_same_greedy_tokens(folder, greedy):
    with rollout_world(folder, tp_size=2) as world:
        assert world.run(world.engine.generate(PROMPT, sampling(0.0, 64))).token_ids == greedy.token_ids


OWNER = """
import sys, time
from pathlib import Path
from tests.e2e.rollout_world import rollout_world

if __name__ == "__main__":
    with rollout_world(Path(sys.argv[1]), tp_size=2):
        print("ready", flush=True)
        time.sleep(600)
"""


def test_no_process_outlives_an_owner_that_is_killed(folder, tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, script, folder], env=environment, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout.readline().strip() == "ready"
        left = [process.pid for process in psutil.Process(owner.pid).children(recursive=True)]
        assert len(left) >= 3, "an engine and two workers"
        owner.kill()
        assert not still_running(left, within_s=20.0)
