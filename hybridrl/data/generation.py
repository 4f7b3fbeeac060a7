"""Generation in tokens: what an agent loop asks of a rollout engine and what it gets back.

An agent loop sees only :class:`TokenEngine`, so it runs the same on vLLM and on a fake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridrl.data.sample import FinishReason

Routing = NDArray[np.int16]
"""[num_tokens, num_moe_layers, top_k] experts that tokens chose."""


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How one completion is sampled.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_p: Nucleus mass; 1 keeps the whole distribution.
        max_tokens: Tokens of this completion, at most.
        stop_token_ids: Tokens that end the completion; the one that ended it is part of the completion.
        seed: Seed of this completion's random numbers; None draws from the engine's.
    """

    temperature: float
    top_p: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy produced in one turn.

    Attributes:
        token_ids: Sampled tokens, the stop token included.
        logprobs: Log-prob of each sampled token under the distribution that it was sampled from, that is after
            temperature and top-p.
        finish_reason: STOP at a stop token, LENGTH at a limit.
        policy_version: Version of the weights that sampled every token.
        routing: [num_tokens - 1, num_moe_layers, top_k] int16 experts of each token of prompt and completion but the last, which
            was never computed; None when they were not recorded.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    routing: Routing | None = None


class TokenEngine(Protocol):
    """Continues token sequences; many calls run at once."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingSpec) -> Completion:
        """Continue `token_ids`. Cancelling the call aborts the generation.

        Raises:
            EngineError: The engine failed or refuses the request.
        """
        ...
