"""Holds two forward passes against each other, in the order of computation.

The first operator over the tolerance is the faulty one: everything that it reads agreed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.parity.activations import Activations, Floats, Site


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an operator is from the reference.

    Attributes:
        relative: Largest difference over the largest magnitude of the reference; infinite for what is not a number or has
            another shape.
    """

    site: Site
    relative: float


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """How far an engine is from the reference at the end.

    Attributes:
        engine: With its layout, for people.
        logprobs: Largest difference of a token's log-prob, in nats.
        logits: Largest difference of a logit; None when the engine keeps them to itself.
    """

    engine: str
    logprobs: float
    logits: float | None = None


def differences(got: Activations, want: Activations) -> list[Difference]:
    """Compare what both have, in the order of computation."""
    sites = sorted(got.values.keys() & want.values.keys(), key=lambda site: site.order)
    return [Difference(site, relative_gap(got.values[site], want.values[site])) for site in sites]


def first_over(found: Sequence[Difference], tolerance: float) -> Difference | None:
    """Return the first operator whose relative difference exceeds `tolerance`, None when all are within."""
    return next((difference for difference in found if not difference.relative <= tolerance), None)


def relative_gap(got: Floats, want: Floats) -> float:
    """Return max |got - want| / max |want|; infinity when that is not a number or the shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    gap = float(np.abs(got - want).max())
    return gap / max(float(np.abs(want).max()), 1e-30) if np.isfinite(gap) else float("inf")


def token_logprobs(logits: Floats, token_ids: Sequence[int]) -> Floats:
    """Return the log-probs of tokens 1.. given those before.

    Args:
        logits: [at least tokens - 1, vocabulary].

    Returns:
        [tokens - 1] float32.
    """
    rows = logits[: len(token_ids) - 1].astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(rows, np.asarray(token_ids[1:])[:, None], axis=-1)[:, 0]
    logprobs: Floats = (chosen - np.log(np.exp(rows).sum(axis=-1))).astype(np.float32)
    return logprobs
