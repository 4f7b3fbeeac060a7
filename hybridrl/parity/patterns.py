"""Ways in which one array may be a simple function of another: what turns a difference into a cause."""

from __future__ import annotations

import numpy as np

from hybridrl.parity.activations import Floats

_EXPLAINED = 0.05
"""Share of a difference that may be left over once a pattern is taken out."""


def factor_along(got: Floats, want: Floats, axes: tuple[int, ...]) -> Floats | None:
    """Return f with got = f * want, one number per position outside of `axes`; None when there is none.

    Worked example: a norm with another epsilon scales every token by its own factor, so for [tokens, hidden] the factors along
    axis 1 are [tokens, 1].
    """
    power = np.maximum((want * want).sum(axis=axes, keepdims=True), 1e-30)
    factor: Floats = (got * want).sum(axis=axes, keepdims=True) / power
    return factor if _explains(factor * want, got, want) else None


def constant_factor(got: Floats, want: Floats) -> float | None:
    """Return the number f with got = f * want, None when there is none."""
    factor = factor_along(got, want, tuple(range(got.ndim)))
    return None if factor is None else float(factor.item())


def is_offset(got: Floats, want: Floats) -> bool:
    """Tell whether got = want + b with the same b for every token, the first axis."""
    offset = (got - want).mean(axis=0, keepdims=True)
    return _explains(want + offset, got, want)


def moved(got: Floats, want: Floats, axis: int) -> list[tuple[int, int]]:
    """Return pairs (i, j): slice i of got along `axis` is slice j of want; empty unless got is want in another order."""
    size = got.shape[axis]
    rows, originals = (np.moveaxis(x, axis, 0).reshape(size, -1) for x in (got, want))
    distances = np.stack([np.abs(originals - row).max(axis=1) for row in rows])
    source = distances.argmin(axis=1)
    is_order = len(set(source.tolist())) == size and _explains(originals[source], rows, originals)
    return [(i, int(j)) for i, j in enumerate(source) if i != j] if is_order else []


def _explains(model: Floats, got: Floats, want: Floats) -> bool:
    return float(np.abs(got - model).max()) < _EXPLAINED * float(np.abs(got - want).max())
