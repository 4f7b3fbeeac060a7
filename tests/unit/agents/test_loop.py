"""Seeds of turns, the single-turn loop, and which loop plays which task."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from hybridrl.agents import make_agent_loop, max_added_tokens
from hybridrl.agents.calc_tool import CalcToolLoop
from hybridrl.agents.loop import turn_seed
from hybridrl.agents.single_turn import SingleTurnLoop
from hybridrl.config.choices import TaskName
from hybridrl.data.sample import FinishReason
from tests.unit.agents.fakes import ScriptedEngine, prompt, sampling
from tests.unit.data.tokenizers import demo_tokenizer


def test_turn_seeds_are_the_same_in_every_process() -> None:
    assert turn_seed(1, "calc-0", 0, 0) == 1061485250


def test_every_turn_has_a_seed_of_its_own() -> None:
    seeds = {
        turn_seed(*key) for key in ((1, "a", 0, 0), (2, "a", 0, 0), (1, "b", 0, 0), (1, "a", 1, 0), (1, "a", 0, 1))
    }
    assert len(seeds) == 5
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("seed", [1, None])
def test_loops_pass_derived_seeds_on(seed: int | None) -> None:
    engine = ScriptedEngine(["<calc>1+1</calc>", "2<eos>"])
    asyncio.run(CalcToolLoop(demo_tokenizer()).run(prompt("1+1=?"), 5, engine, sampling(seed=seed)))
    expected = [None if seed is None else turn_seed(seed, "p0", 5, turn) for turn in range(2)]
    assert [spec.seed for _, spec in engine.calls] == expected


def test_a_single_turn_runs_to_a_stop_token_or_to_the_limit() -> None:
    loop = SingleTurnLoop(demo_tokenizer())
    engine = ScriptedEngine(["cba<eos>abc"])
    sample = asyncio.run(loop.run(prompt("rev:abc="), 0, engine, sampling()))
    assert (sample.text, sample.finish_reason, sample.num_turns) == ("cba<eos>", FinishReason.STOP, 1)
    assert dataclasses.replace(engine.calls[0][1], seed=1) == dataclasses.replace(sampling(), stop_token_ids=(2,))
    sample = asyncio.run(loop.run(prompt("rev:abc="), 0, ScriptedEngine(["cba<eos>"]), sampling(max_tokens=2)))
    assert (sample.text, sample.finish_reason) == ("cb", FinishReason.LENGTH)


def test_each_token_keeps_the_experts_of_the_turn_that_computed_it_first() -> None:
    engine = ScriptedEngine(["<calc>1+1</calc>", "2<eos>"], records_routing=True)
    sample = asyncio.run(CalcToolLoop(demo_tokenizer()).run(prompt("1+1=?"), 0, engine, sampling()))
    assert sample.routing is not None
    (first_prompt, _), (second_prompt, _) = engine.calls
    turn_0 = len(first_prompt) + len(demo_tokenizer().encode("<calc>1+1</calc>")) - 1
    turn_1 = len(sample.token_ids) - 1 - turn_0
    assert turn_1 >= len(second_prompt) - turn_0
    assert sample.routing[:, 0].tolist() == [[0, 1]] * turn_0 + [[1, 2]] * turn_1 + [[-1, -1]]


def test_without_recording_a_sample_has_no_routing() -> None:
    sample = asyncio.run(SingleTurnLoop(demo_tokenizer()).run(prompt("a"), 0, ScriptedEngine(["b<eos>"]), sampling()))
    assert sample.routing is None


def test_cancelling_a_loop_cancels_its_generation() -> None:
    class Stuck:
        was_cancelled = False

        async def generate(self, token_ids: object, sampling: object) -> object:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise

    async def cancel(engine: Stuck) -> None:
        task = asyncio.create_task(SingleTurnLoop(demo_tokenizer()).run(prompt("a"), 0, engine, sampling()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    engine = Stuck()
    asyncio.run(cancel(engine))
    assert engine.was_cancelled


def test_every_task_has_a_loop_and_a_bound_on_its_tokens() -> None:
    loops = {task: type(make_agent_loop(task, demo_tokenizer())) for task in TaskName}
    assert loops == {TaskName.CALC: CalcToolLoop, TaskName.REVERSE: SingleTurnLoop, TaskName.FILE: SingleTurnLoop}
    assert (max_added_tokens(TaskName.CALC, 500), max_added_tokens(TaskName.FILE, 500)) == (35, 500)
