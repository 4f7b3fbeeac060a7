"""Facts of a rotary embedding; the engines compute it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated (Llama 3.1)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: frequencies are interpolated by parts, and attention is sharpened.

    Attributes:
        beta_fast: Rotations over the original context above which a frequency is kept.
        beta_slow: Rotations below which it is divided by `factor`.
        attention_factor: Multiplies the cosines and sines.
        softmax_mscale: Of latent attention, whose softmax scale is multiplied by ``mscale(factor, softmax_mscale) ** 2``.
        is_truncated: Whether the borders of the interpolated part are rounded to whole dimensions.

    Source: https://arxiv.org/abs/2309.00071.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    softmax_mscale: float
    is_truncated: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding.

    Attributes:
        theta: Base of the frequencies.
        fraction: Part of each head that rotates, from its first dimension on.
        scaling: None for the plain embedding.
    """

    theta: float
    fraction: float = 1.0
    scaling: RopeScaling | None = None


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return ``0.1 * mscale * ln(factor) + 1``, and 1 where nothing is extended."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
