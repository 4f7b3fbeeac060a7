"""Objectives: what one micro-batch adds to the loss, and the sums that metrics are made of.

An objective sees the log-probs and entropies of picked tokens and returns a loss that is summed, never averaged, over
tokens, micro-batches and ranks: ``loss_weights`` carry the whole normalisation.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hybridrl.algos.kl import kl_per_token
from hybridrl.algos.policy_loss import PolicyLossConfig, PolicyTokens, make_policy_loss

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
    """Return the policy loss with its KL and entropy terms."""
    policy_loss = make_policy_loss(config)

    def token_loss(
        logprobs: torch.Tensor, entropies: torch.Tensor, values: Values
    ) -> tuple[torch.Tensor, dict[Sum, torch.Tensor]]:
        old, ref = values["old_logprobs"], values.get("ref_logprobs")
        result = policy_loss(PolicyTokens(logprobs, old, values["advantages"], values["segments"]), config)
        loss = result.loss
        log_ratio = logprobs.detach() - old
        sums = {Sum.KL: -log_ratio.sum(), Sum.CLIPPED: result.is_clipped.sum(), Sum.RATIO: log_ratio.exp().sum()}
        if ref is not None:
            kl = kl_per_token(config.kl_estimator, logprobs, ref, unbiased_gradient=config.kl_unbiased_gradient)
            loss = loss + config.kl_coef * kl if config.kl_coef else loss
            sums[Sum.REF_KL] = kl.detach().sum()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropies
        return loss, sums

    return Objective(token_loss)


def supervised_objective() -> Objective:
    """Return the negative log-likelihood."""
    return Objective(lambda logprobs, entropies, values: (-logprobs, {}))
