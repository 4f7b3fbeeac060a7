"""The calculator in two turns: a call by the policy, its result by the environment, the answer by the policy.

    12+34-56=?  <calc>12+34-56</calc>  <res>-10</res>  -10<eos>
    prompt      policy, turn 0         environment     policy, turn 1

A first turn that ends without a call is the whole sample. A call of anything but sums and differences of natural
numbers gets no result: the environment ends the sample there.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.agents.loop import Trajectory
from hybridrl.data.generation import SamplingSpec, TokenEngine
from hybridrl.data.sample import FinishReason, Prompt, Sample
from hybridrl.data.tasks.calc import (
    CALL_END,
    CALL_START,
    MAX_ANSWER_TOKENS,
    MAX_CALL_TOKENS,
    evaluate,
    tool_result,
)
from hybridrl.data.tokenizer import Tokenizer

# The result of a call is at most as long as the call: its value has no more digits than the expression has characters.
MAX_ADDED_TOKENS = MAX_CALL_TOKENS + MAX_CALL_TOKENS + MAX_ANSWER_TOKENS


class CalcToolLoop:
    """See the module and :class:`AgentLoop`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._call_start = tokenizer.token_id(CALL_START)
        self._call_end = tokenizer.token_id(CALL_END)

    async def run(self, prompt: Prompt, sample_index: int, engine: TokenEngine, sampling: SamplingSpec) -> Sample:
        """Play one sample to its end."""
        trajectory = Trajectory(prompt, sample_index)
        stops = (self._call_end, *self._tokenizer.stop_token_ids)
        first = await trajectory.sample_turn(engine, sampling, stops, MAX_CALL_TOKENS)
        if first.token_ids[-1:] != (self._call_end,):
            return trajectory.finish(first.finish_reason, self._tokenizer)
        value = self._evaluate(first.token_ids)
        if value is None:
            return trajectory.finish(FinishReason.ENVIRONMENT, self._tokenizer)
        trajectory.add_environment(self._tokenizer.encode(tool_result(str(value))))
        second = await trajectory.sample_turn(engine, sampling, self._tokenizer.stop_token_ids, MAX_ANSWER_TOKENS)
        return trajectory.finish(second.finish_reason, self._tokenizer)

    def _evaluate(self, turn: Sequence[int]) -> int | None:
        """Return the value of ``<calc>EXPRESSION</calc>``; None when the turn is anything else."""
        if turn[0] != self._call_start:
            return None
        return evaluate(self._tokenizer.decode(turn[1:-1]))
