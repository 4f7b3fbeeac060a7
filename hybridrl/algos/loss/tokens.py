"""What a policy loss sees, and what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridrl.algos.kl import MAX_LOG_RATIO
from hybridrl.config.algorithm import PolicyLossConfig


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Trained tokens of one micro-batch; all tokens of a sequence are in the same micro-batch, on one rank.

    Attributes:
        logprobs: [num_tokens] log-probs under the policy being trained, differentiable.
        old_logprobs: [num_tokens] log-probs before the update.
        advantages: [num_tokens] float32.
        segments: [num_tokens] number of the sequence that each token belongs to; any numbers.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    segments: torch.Tensor

    @property
    def log_ratio(self) -> torch.Tensor:
        """[num_tokens] log of new to old probability, differentiable, clamped so that its exp is finite."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of [num_tokens] values over the tokens of each one's sequence, at each token."""
        numbers, index = torch.unique(self.segments, return_inverse=True)
        totals = values.new_zeros(len(numbers)).index_add(0, index, values)
        counts = values.new_zeros(len(numbers)).index_add(0, index, torch.ones_like(values))
        return (totals / counts)[index]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Of [num_tokens] each.

    Attributes:
        loss: Loss before weights, differentiable.
        is_clipped: True where clipping removed the gradient.
    """

    loss: torch.Tensor
    is_clipped: torch.Tensor


PolicyLoss = Callable[[PolicyTokens, PolicyLossConfig], TokenLoss]
