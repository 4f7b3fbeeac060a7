"""The calculator loop: what the environment does with each kind of first turn."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hybridrl.agents.calc_tool import MAX_ADDED_TOKENS, CalcToolLoop
from hybridrl.data.sample import FinishReason, Sample
from tests.unit.agents.fakes import ScriptedEngine, prompt, sampling
from tests.unit.data.tokenizers import demo_tokenizer

QUESTION = "12+34-56=?"


def play(*turns: str, max_tokens: int = 32) -> tuple[Sample, ScriptedEngine]:
    engine = ScriptedEngine(list(turns))
    loop = CalcToolLoop(demo_tokenizer())
    return asyncio.run(loop.run(prompt(QUESTION), 3, engine, sampling(max_tokens))), engine


def test_a_call_gets_its_result_and_the_policy_a_second_turn() -> None:
    sample, engine = play("<calc>12+34-56</calc>", "-10<eos>")
    assert sample.text == "<calc>12+34-56</calc><res>-10</res>-10<eos>"
    assert (sample.num_turns, sample.finish_reason, sample.sample_index) == (2, FinishReason.STOP, 3)
    assert len(engine.calls) == 2


def test_only_policy_tokens_are_trained_on_and_have_logprobs_and_versions() -> None:
    sample, _ = play("<calc>12+34-56</calc>", "-10<eos>")
    num_prompt, num_call, num_result, num_answer = 11, 10, 5, 4
    expected = np.repeat([False, True, False, True], [num_prompt, num_call, num_result, num_answer])
    assert np.array_equal(sample.loss_mask, expected)
    assert sample.policy_versions.tolist() == [-1] * 11 + [7] * 10 + [-1] * 5 + [8] * 4
    assert np.all(sample.rollout_logprobs[~sample.loss_mask] == 0)
    assert sample.rollout_logprobs[sample.loss_mask][:2].tolist() == [-0.25, -0.5]
    assert sample.num_response_tokens == num_call + num_answer
    assert sample.oldest_version == 7


def test_the_second_turn_continues_the_very_tokens_of_the_first() -> None:
    sample, engine = play("<calc>12+34-56</calc>", "-10<eos>")
    assert engine.calls[1][0] == tuple(sample.token_ids[:26])


def test_the_environment_computes_what_was_called_and_not_what_was_asked() -> None:
    assert play("<calc>1+1</calc>", "2<eos>")[0].text == "<calc>1+1</calc><res>2</res>2<eos>"


@pytest.mark.parametrize(
    ("turn", "text", "reason"),
    [
        ("-10<eos>", "-10<eos>", FinishReason.STOP),
        ("<calc>12+34-56+78+90</calc>", "<calc>12+34-56+78+9", FinishReason.LENGTH),
        ("<eos>", "<eos>", FinishReason.STOP),
        ("<calc></calc>", "<calc></calc>", FinishReason.ENVIRONMENT),
        ("<calc>1*2</calc>", "<calc>1*2</calc>", FinishReason.ENVIRONMENT),
        ("</calc>", "</calc>", FinishReason.ENVIRONMENT),
        ("7<calc>1+2</calc>", "7<calc>1+2</calc>", FinishReason.ENVIRONMENT),
        ("<calc><calc>1</calc>", "<calc><calc>1</calc>", FinishReason.ENVIRONMENT),
    ],
)
def test_a_first_turn_without_a_valid_call_is_the_whole_sample(turn: str, text: str, reason: FinishReason) -> None:
    sample, engine = play(turn, "unused")
    assert (sample.text, sample.finish_reason, sample.num_turns) == (text, reason, 1)
    assert len(engine.calls) == 1


def test_an_empty_turn_is_a_sample_without_policy_tokens() -> None:
    sample, _ = play("")
    assert (sample.num_response_tokens, sample.oldest_version, sample.text) == (0, -1, "")


def test_turns_are_limited_by_the_task_and_by_the_configuration() -> None:
    _, engine = play("<calc>1+1</calc>", "2<eos>")
    assert [spec.max_tokens for _, spec in engine.calls] == [14, 7]
    _, engine = play("<calc>1+1</calc>", "2<eos>", max_tokens=10)
    assert [spec.max_tokens for _, spec in engine.calls] == [10, 7]


def test_only_the_first_turn_can_stop_at_a_call() -> None:
    _, engine = play("<calc>1+1</calc>", "2<eos>")
    eos, call_end = demo_tokenizer().eos_id, demo_tokenizer().token_id("</calc>")
    assert [spec.stop_token_ids for _, spec in engine.calls] == [(call_end, eos), (eos,)]


def test_the_longest_sample_fits_the_declared_number_of_added_tokens() -> None:
    sample, _ = play("<calc>999999999999</calc>", "1234567")
    assert len(sample.token_ids) - 11 == MAX_ADDED_TOKENS
