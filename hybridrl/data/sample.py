"""Prompts and samples: what rollouts receive and return, as token ids.

Per-token arrays are aligned to positions: entry t of `rollout_logprobs` is log p(token t | tokens before t). Nothing is
re-tokenised between turns; `loss_mask` marks the tokens that the policy produced.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class FinishReason(enum.Enum):
    """Why a rollout ended."""

    STOP = "stop"
    LENGTH = "length"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenised once.

    Attributes:
        prompt_id: Unique within the run.
        token_ids: Prompt tokens.
        text: What the tokens say.
        answer: Ground truth that the reward compares with.
        source: Where it comes from, ``file:row`` or the task's name.
        data_source: Name of its data set, by which evaluation is broken down; empty when none is known.
        extra_info: JSON of what else its row says for rewards; empty when it says nothing.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str
    source: str
    data_source: str = ""
    extra_info: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished rollout of a prompt.

    Attributes:
        sample_index: Which of the prompt's samples this is, from 0.
        token_ids: [num_tokens] int32; prompt, then turns.
        loss_mask: [num_tokens] bool; True where the policy produced the token.
        rollout_logprobs: [num_tokens] float32; the sampler's processed log-probs, 0 where loss_mask is False.
        policy_versions: [num_tokens] int32; version that sampled the token, -1 where loss_mask is False.
        num_turns: Number of policy turns.
        text: The response, all turns, special tokens shown.
        routing: [num_tokens, num_moe_layers, top_k] int16 experts that the sampler chose, -1 where it computed nothing (the last
            token of the sample); None when they were not recorded.
        is_greedy: Whether each token was the likeliest: the baseline of its prompt's other samples, which is not trained on.
    """

    prompt: Prompt
    sample_index: int
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    finish_reason: FinishReason
    num_turns: int
    text: str
    routing: NDArray[np.int16] | None = None
    is_greedy: bool = False

    @property
    def num_response_tokens(self) -> int:
        """Tokens that the policy produced."""
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int:
        """Lowest policy version among the tokens that the policy produced; -1 when there is none."""
        return int(self.policy_versions[self.loss_mask].min()) if self.loss_mask.any() else -1
