"""The policy loss per token: clipped ratio, optional KL to a reference, optional entropy bonus.

``L_t = -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) + kl_coef k3_t - entropy_coef H_t`` with
``rho_t = exp(logprobs_t - old_logprobs_t)``. Engines weigh and sum these losses; see ``aggregate.py``.

Source: PPO, arXiv 1707.06347, equation 7; asymmetric clip: DAPO, arXiv 2503.14476, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridrl.algos.kl import MAX_LOG_RATIO, k3


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """Coefficients of the policy loss.

    Attributes:
        clip_low: The ratio is clipped below 1 - clip_low.
        clip_high: The ratio is clipped above 1 + clip_high.
        kl_coef: Weight of the k3 term; 0 needs no ref_logprobs.
        entropy_coef: Weight of the entropy bonus.
    """

    clip_low: float
    clip_high: float
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss per token and what is reported about it; all [...] like the log-probs.

    Attributes:
        loss: Differentiable.
        is_clipped: bool; True where the clip bounds the gradient, that is where the clipped term is the smaller.
        kl: k3 to the reference, detached; 0 without one.
    """

    loss: torch.Tensor
    is_clipped: torch.Tensor
    kl: torch.Tensor


def policy_token_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Return the clipped surrogate loss per token.

    Args:
        logprobs: [...] log-probs under the policy being trained.
        old_logprobs: [...] log-probs of the same tokens before the update.
        advantages: [...] advantage of each token.

    Returns:
        [...] loss, differentiable in `logprobs`; its gradient is 0 where the clip holds.
    """
    unclipped, clipped = _surrogates(logprobs, old_logprobs, advantages, clip_low, clip_high)
    return -torch.minimum(unclipped, clipped)


def actor_token_loss(
    config: PolicyLossConfig,
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
) -> TokenLoss:
    """Return the whole policy loss per token: surrogate, KL term and entropy bonus.

    Args:
        entropies: [...] entropy of the policy at each token; needs a gradient only when entropy_coef is not 0.
        ref_logprobs: [...] log-probs under the reference; required when kl_coef is not 0.
    """
    unclipped, clipped = _surrogates(logprobs, old_logprobs, advantages, config.clip_low, config.clip_high)
    loss = -torch.minimum(unclipped, clipped)
    kl = torch.zeros_like(loss)
    if ref_logprobs is not None:
        kl = k3(logprobs, ref_logprobs)
    assert ref_logprobs is not None or config.kl_coef == 0.0, config
    if config.kl_coef != 0.0:
        loss = loss + config.kl_coef * kl
    if config.entropy_coef != 0.0:
        loss = loss - config.entropy_coef * entropies
    return TokenLoss(loss, clipped < unclipped, kl.detach())


def _surrogates(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ratio * advantage and clipped ratio * advantage."""
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
