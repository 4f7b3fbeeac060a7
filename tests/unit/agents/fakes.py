"""A policy that writes what a test tells it to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hybridrl.data.generation import Completion, SamplingSpec
from hybridrl.data.sample import FinishReason, Prompt
from tests.unit.data.tokenizers import demo_tokenizer


@dataclass
class ScriptedEngine:
    """Writes the scripted turns, cut at stop tokens and limits as a real engine does; version 7, then 8, ...

    Attributes:
        records_routing: Whether every token of turn t chooses experts t and t + 1, in one layer.
        calls: What it was asked, in order.
    """

    turns: list[str]
    records_routing: bool = False
    calls: list[tuple[tuple[int, ...], SamplingSpec]] = field(default_factory=list)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingSpec) -> Completion:
        turn = len(self.calls)
        self.calls.append((tuple(token_ids), sampling))
        written: list[int] = []
        reason = FinishReason.LENGTH
        for token in demo_tokenizer().encode(self.turns[turn])[: sampling.max_tokens]:
            written.append(token)
            if token in sampling.stop_token_ids:
                reason = FinishReason.STOP
                break
        logprobs = tuple(-0.25 * (index + 1) for index in range(len(written)))
        num_computed = len(token_ids) + len(written) - 1
        routing = (
            np.tile(np.array([[turn, turn + 1]], np.int16), (num_computed, 1, 1)) if self.records_routing else None
        )
        return Completion(tuple(written), logprobs, reason, 7 + turn, routing)


def sampling(max_tokens: int = 32, seed: int | None = 1) -> SamplingSpec:
    return SamplingSpec(temperature=1.0, top_p=1.0, max_tokens=max_tokens, stop_token_ids=(), seed=seed)


def prompt(text: str, answer: str = "") -> Prompt:
    return Prompt("p0", demo_tokenizer().encode_prompt(text), text, answer, "test")
