"""What one run hands to its recorder: metrics of a step and finished rollouts.

The types stand alone, so that this package needs neither the data layer nor torch. Per-token arrays follow the same
convention as everywhere: entry t belongs to token t of the sequence.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Metric = float | int | bool


class Outcome(enum.Enum):
    """How a run stands, as the report shows it."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One scored rollout, as it was trained on.

    Attributes:
        prompt_id: Unique within the run.
        sample_index: Which of the prompt's samples this is, from 0.
        prompt: Text of the prompt.
        answer: Ground truth that the reward compared with.
        response: Text of all turns, special tokens shown.
        reward: Score of the whole rollout.
        finish_reason: Why the rollout ended.
        num_turns: Number of policy turns.
        token_ids: [num_tokens] int32; prompt, then turns.
        loss_mask: [num_tokens] bool; True where the policy produced the token.
        rollout_logprobs: [num_tokens] float32, from the sampler.
        old_logprobs: [num_tokens] float32, from the actor before the update.
        advantages: [num_tokens] float32.
        policy_versions: [num_tokens] int32; version that sampled the token, -1 where loss_mask is False.
        data_source: Name of the prompt's data set; empty when none is known.
    """

    prompt_id: str
    sample_index: int
    prompt: str
    answer: str
    response: str
    reward: float
    finish_reason: str
    num_turns: int
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    old_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    data_source: str = ""
