"""Objectives: what one micro-batch adds to the loss, and the sums that metrics are made of.

An objective sees the log-probs and entropies of picked tokens and returns a loss that is summed, never averaged, over
tokens, micro-batches and ranks: ``loss_weights`` carry the whole normalisation.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hybridrl.algos.kl import k3
from hybridrl.algos.policy_loss import PolicyLossConfig, policy_token_loss

Values = Mapping[str, torch.Tensor]


class Sum(enum.IntEnum):
    """Rows of the vector of sums."""

    LOSS = 0
    TOKENS = 1
    ENTROPY = 2
    KL = 3
    CLIPPED = 4
    RATIO = 5
    REF_KL = 6


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss over the picked tokens.

    Attributes:
        token_loss: (logprobs, entropies, values) -> [num_picked] loss of each token, before loss_weights, and sums.
    """

    token_loss: Callable[[torch.Tensor, torch.Tensor, Values], tuple[torch.Tensor, dict[Sum, torch.Tensor]]]

    def __call__(
        self, logprobs: torch.Tensor, entropies: torch.Tensor, values: Values
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of one micro-batch and the [len(Sum)] float64 vector of its sums."""
        token_loss, token_sums = self.token_loss(logprobs, entropies, values)
        loss = (values["loss_weights"] * token_loss).sum()
        sums = torch.zeros(len(Sum), dtype=torch.float64, device=loss.device)
        sums[Sum.LOSS] = loss.detach()
        sums[Sum.TOKENS] = logprobs.numel()
        sums[Sum.ENTROPY] = entropies.detach().sum()
        for name, value in token_sums.items():
            sums[name] = value
        return loss, sums


def policy_objective(config: PolicyLossConfig) -> Objective:
    """Return the clipped policy loss with its KL and entropy terms."""

    def token_loss(
        logprobs: torch.Tensor, entropies: torch.Tensor, values: Values
    ) -> tuple[torch.Tensor, dict[Sum, torch.Tensor]]:
        old, advantages, ref = values["old_logprobs"], values["advantages"], values.get("ref_logprobs")
        loss = policy_token_loss(logprobs, old, advantages, config.clip_low, config.clip_high)
        log_ratio = logprobs.detach() - old
        ratio = log_ratio.exp()
        is_clipped = ((ratio > 1 + config.clip_high) & (advantages > 0)) | (
            (ratio < 1 - config.clip_low) & (advantages < 0)
        )
        sums = {Sum.KL: -log_ratio.sum(), Sum.CLIPPED: is_clipped.sum(), Sum.RATIO: ratio.sum()}
        if ref is not None:
            kl = k3(logprobs, ref)
            loss = loss + config.kl_coef * kl if config.kl_coef else loss
            sums[Sum.REF_KL] = kl.detach().sum()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropies
        return loss, sums

    return Objective(token_loss)


def supervised_objective() -> Objective:
    """Return the negative log-likelihood."""
    return Objective(lambda logprobs, entropies, values: (-logprobs, {}))
