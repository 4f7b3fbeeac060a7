"""The critic's loss, clipped around the values before the update.

``L_t = 1/2 max((V_t - R_t)^2, (clip(V_t, V_old - clip_value, V_old + clip_value) - R_t)^2)``.

Source: PPO as in arXiv 2005.12729, section 3 (value function clipping).

Worked example: V 1, V_old 0.5, R 2, clip_value 0.2: the clipped value is 0.7, so the loss is (0.7 - 2)^2 / 2 = 0.845, flat.
"""

from __future__ import annotations

import torch


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_value: float | None
) -> torch.Tensor:
    """Return the [...] loss per token, differentiable in `values`; its gradient is 0 where the clip holds.

    Args:
        values: [...] of the critic being trained.
        old_values: [...] before the update.
        returns: [...] from :func:`hybridrl.algos.advantage.gae.gae`.
        clip_value: How far a value may move with a gradient; None does not clip.
    """
    plain = (values - returns).square()
    if clip_value is None:
        return 0.5 * plain
    moved = old_values + (values - old_values).clamp(-clip_value, clip_value)
    return 0.5 * torch.maximum(plain, (moved - returns).square())
