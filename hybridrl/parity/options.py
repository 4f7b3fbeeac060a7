"""What a parity check is asked to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParityOptions:
    """How to compare.

    Attributes:
        num_tokens: Length of the scored sequence; less when the model or the sampler takes less.
        tolerance: Bound on the relative difference of an operator.
        logprob_tolerance: Bound on the difference of a token's log-prob, in nats.
        has_vllm: Whether to score with vLLM, too.
    """

    num_tokens: int = 48
    tolerance: float = 1e-4
    logprob_tolerance: float = 2e-3
    has_vllm: bool = True
