"""What the training engine returns: plain numbers and arrays, on the reporting rank of each data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LogprobResult:
    """Per-token results of a forward pass; entry t belongs to token t, and entry 0 is 0.

    Attributes:
        logprobs: [num_samples, max_tokens] float32; 0 beyond a row's length.
        entropies: [num_samples, max_tokens] float32; entropy of the distribution that token t was drawn from.
        routing: [num_samples, max_tokens, num_moe_layers, top_k] int16 experts that the pass chose, -1 beyond a row's length; None
            unless they were recorded.
    """

    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]
    routing: NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True)
class ValueMetrics:
    """One optimizer step of a critic, over the global batch; the same on every reporting rank.

    Attributes:
        loss: Weighted sum of token losses.
        grad_norm: Before clipping.
        lr: Learning rate of this step.
        value_mean: Mean value over the tokens of the loss, before the step.
        return_mean: Mean return over them.
        explained_variance: 1 - mean squared error / variance of the returns; 0 when they do not vary.
        clip_fraction: Share of tokens whose value was further from the old one than the clip allows.
        num_tokens: Tokens of the loss.
        is_skipped: Whether gradients were not finite, so that the parameters stayed as they were.
        num_skipped: Skipped steps since the engine started.
    """

    loss: float
    grad_norm: float
    lr: float
    value_mean: float
    return_mean: float
    explained_variance: float
    clip_fraction: float
    num_tokens: int
    is_skipped: bool
    num_skipped: int


@dataclass(frozen=True, slots=True)
class BalanceMetrics:
    """Of one update; the same on all ranks.

    Attributes:
        aux_loss: Load-balancing loss before its weight, mean over layers; 1 when even, 0 when the loss is off.
        z_loss: Before its weight, mean over layers; 0 when off.
        max_load: Tokens of the busiest expert over the mean of its layer's experts, in the worst layer.
    """

    aux_loss: float
    z_loss: float
    max_load: float


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """One optimizer step, over the global batch; the same on every reporting rank.

    Attributes:
        loss: Weighted sum of token losses.
        grad_norm: Before clipping.
        entropy: Mean over the tokens of the loss.
        lr: Learning rate of this step.
        approx_kl: Mean of old_logprobs - logprobs.
        clip_fraction: Share of tokens whose gradient the clipping removed.
        ratio_mean: Mean of exp(logprobs - old_logprobs).
        ref_kl: Mean k3 estimate against the reference; 0 without one.
        num_tokens: Tokens of the loss.
        is_skipped: Whether gradients were not finite, so that the parameters stayed as they were.
        num_skipped: Skipped steps since the engine started.
        num_replayed: Choices of experts, a token in a layer each, that were replayed; over all ranks.
        num_replay_changed: Those of them that the routers would have made differently.
        balance: How tokens spread over experts; None for a model without.
        logprobs: [num_samples, max_tokens] float32 log-probs before the step, 0 outside the loss; only when asked for.
    """

    loss: float
    grad_norm: float
    entropy: float
    lr: float
    approx_kl: float
    clip_fraction: float
    ratio_mean: float
    ref_kl: float
    num_tokens: int
    is_skipped: bool
    num_skipped: int
    num_replayed: int = 0
    num_replay_changed: int = 0
    balance: BalanceMetrics | None = None
    logprobs: NDArray[np.float32] | None = None
