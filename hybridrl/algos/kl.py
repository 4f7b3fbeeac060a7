"""Estimators of the KL divergence from the policy to the reference, per token, and the adaptive weight of a KL penalty.

With ``d = ref_logprobs - logprobs`` of tokens that the policy sampled:

    k1 = -d              unbiased, of either sign; its own gradient has expectation 0
    k2 = d^2 / 2         biased, low variance; its gradient, -d grad(logprobs), is an unbiased gradient of the KL
    k3 = exp(d) - d - 1  unbiased, never negative; its gradient is that of the KL in the other direction

Sources: J. Schulman, "Approximating KL Divergence", 2020; gradients: "On a few pitfalls in KL divergence gradient estimation
for RL", arXiv 2506.09477; adaptive weight: "Fine-Tuning Language Models from Human Preferences", arXiv 1909.08593, section 2.2.

Worked example: logprobs -1 and ref_logprobs -1.5 have d = -0.5, so k1 = 0.5, k2 = 0.125 and k3 = 0.1065.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from hybridrl.config.algorithm import RewardKlConfig
from hybridrl.config.choices import KlEstimator

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this magnitude before exp: exp(20) is 4.9e8, far past any clip, and finite in bf16."""

_MAX_ERROR = 0.2


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return ``logprobs - ref_logprobs``; see :func:`kl_per_token`."""
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return ``(logprobs - ref_logprobs)^2 / 2``; see :func:`kl_per_token`."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return ``exp(d) - d - 1``, never negative, 0 where the two agree; see :func:`kl_per_token`."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


_ESTIMATORS: dict[KlEstimator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    KlEstimator.K1: k1,
    KlEstimator.K2: k2,
    KlEstimator.K3: k3,
}


def kl_per_token(
    estimator: KlEstimator, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, *, unbiased_gradient: bool = False
) -> torch.Tensor:
    """Estimate the KL.

    Args:
        logprobs: [...] log-probs under the policy, of tokens that the policy sampled.
        ref_logprobs: [...] log-probs of the same tokens under the reference.
        unbiased_gradient: Keep the estimator's value, with the gradient of k2 (straight through).

    Returns:
        [...] KL estimate per token, differentiable in `logprobs`.
    """
    value = _ESTIMATORS[estimator](logprobs, ref_logprobs)
    if not unbiased_gradient:
        return value
    surrogate = k2(logprobs, ref_logprobs)
    return value.detach() + surrogate - surrogate.detach()


class RewardKl:
    """The KL penalty in the reward, and its weight, which may adapt to a target.

    After each batch the weight is multiplied by ``1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon_samples``.

    Attributes:
        coef: The weight in force: the whole state.
    """

    def __init__(self, config: RewardKlConfig) -> None:
        self._config = config
        self.coef = config.coef

    def divergence(
        self, old_logprobs: NDArray[np.float32], ref_logprobs: NDArray[np.float32], loss_mask: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Return the [num_samples, max_tokens] estimate per token, not weighed; 0 outside the mask."""
        pair = (torch.from_numpy(np.where(loss_mask, a, 0.0).astype(np.float64)) for a in (old_logprobs, ref_logprobs))
        values: NDArray[np.float64] = kl_per_token(self._config.estimator, *pair).numpy()
        return values

    def adapt(self, kl: float, num_samples: int) -> None:
        """Move the weight after a batch.

        Args:
            kl: Mean KL per token of the batch.
        """
        if self._config.target is not None:
            error = min(max(kl / self._config.target - 1.0, -_MAX_ERROR), _MAX_ERROR)
            self.coef *= 1.0 + error * num_samples / self._config.horizon_samples
