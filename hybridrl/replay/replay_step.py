"""Everything that decided one step's update, as it was: enough to compute rewards, advantages and losses again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrl.data.batch import Floats, PolicyBatch
from hybridrl.data.sample import Sample


@dataclass(frozen=True, slots=True)
class UpdateValues:
    """What the training engine said about one optimizer step.

    Attributes:
        loss: Weighted sum of token losses.
        entropy: Mean over the tokens of the loss.
        approx_kl: Mean of old_logprobs - logprobs.
        clip_fraction: Share of tokens whose gradient the clipping removed.
        ref_kl: Mean estimate against the reference; 0 without one.
    """

    loss: float
    entropy: float
    approx_kl: float
    clip_fraction: float
    ref_kl: float


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One step. All per-token arrays are [num_samples, max_tokens].

    Attributes:
        version: Policy version that the step started from.
        config_text: The configuration that ran, as YAML.
        stop_texts: The tokenizer's stop tokens as a response shows them.
        reward_kl_coef: Weight of the KL penalty in the reward, which may adapt over the run; None without one.
        rewards: [num_samples] float64, before any penalty.
        group_ids: [num_samples] int64; equal for samples of one prompt.
        greedy_rewards: [num_samples] float64 reward of the greedy sample of each one's prompt; None when none were drawn.
        update_numbers: [num_samples] int32; the optimizer step, from 0, that each sample was in.
        policy: What the updates got; loss_weights are those of each sample's own update.
        values: float32, the critic's, of the state before each token; None without a critic.
        returns: float32, what the values were to become; None without a critic.
        logprobs: float32, under the policy at its update, 0 outside the mask.
        updates: One per optimizer step.
    """

    step: int
    version: int
    config_text: str
    stop_texts: tuple[str, ...]
    reward_kl_coef: float | None
    samples: tuple[Sample, ...]
    rewards: NDArray[np.float64]
    group_ids: NDArray[np.int64]
    greedy_rewards: NDArray[np.float64] | None
    update_numbers: NDArray[np.int32]
    policy: PolicyBatch
    values: Floats | None
    returns: Floats | None
    logprobs: Floats
    updates: tuple[UpdateValues, ...]
