"""From the first operator that differs to what is likely wrong with it.

Whatever the operator reads agreed, so its result alone is looked at: is it the expected one times a factor, plus an offset, in
another order, or wrong at some positions only?
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hybridrl.parity.activations import Activations, Floats, Operator, Site
from hybridrl.parity.compare import relative_gap
from hybridrl.parity.patterns import constant_factor, factor_along, is_offset, moved

_ROUNDING = 1e-4
_BFLOAT16 = 2e-2


def likely_causes(site: Site, got: Activations, want: Activations) -> list[str]:
    """Return what would explain the difference at `site`, likeliest first; at least one line.

    Args:
        site: The first operator over the tolerance.
    """
    a, b = got.values[site], want.values[site]
    if a.shape != b.shape:
        return [f"shapes differ: got {a.shape}, expected {b.shape}"]
    if not np.isfinite(a).all():
        return ["got values that are not numbers"]
    if site.operator is Operator.ROUTER_WEIGHTS:
        logits = want.values[Site(Operator.ROUTER_LOGITS, site.layer)]
        return _router_weights(a, b, logits)
    return _PROBES.get(site.operator, _linear)(a, b)


def _norm(got: Floats, want: Floats) -> list[str]:
    causes = []
    if (factor := factor_along(got, want, (1,))) is not None:
        causes.append(f"norm epsilon: every token has its own factor, {factor.min():.6g} to {factor.max():.6g}")
    if factor_along(got, want, (0,)) is not None:
        causes.append("norm weight: every channel has its own factor")
    return causes or ["kind of norm (RMSNorm or LayerNorm), its weight or a bias; or the residual before it"]


def _products(got: Floats, want: Floats) -> list[str]:
    diagonals = [np.diagonal(x, axis1=1, axis2=2) for x in (got, want)]
    if relative_gap(*diagonals) < _ROUNDING:
        return [
            "rotary embedding (theta, scaling, rotating fraction, interleaved pairs): a token's product with itself is right, with "
            "earlier ones it is not"
        ]
    if (factor := constant_factor(got, want)) is not None:
        return [f"scale of queries or keys, such as YaRN's attention factor: all are {factor:.6g} times the expected"]
    if pairs := moved(got, want, 0):
        return [f"order of attention heads: {_pairs('head', pairs)}"]
    return ["query or key projection, a missing bias, QK norm, or its epsilon"]


def _scores(got: Floats, want: Floats) -> list[str]:
    factor = constant_factor(got, want)
    return [f"attention scale: {'not constant' if factor is None else f'{factor:.6g} times the expected'}"]


def _values(got: Floats, want: Floats) -> list[str]:
    if pairs := moved(got, want, 1):
        return [f"order of key and value heads: {_pairs('head', pairs)}"]
    if factor_along(got, want, (1, 2)) is not None and constant_factor(got, want) is None:
        return ["norm epsilon inside latent attention: every token has its own factor"]
    return _linear(got, want)


def _core_attention(got: Floats, want: Floats) -> list[str]:
    wrong = np.abs(got - want).max(axis=1) > _ROUNDING * np.abs(want).max()
    if wrong[0]:
        return ["attention sinks, or the scale of attention: already the first token differs"]
    return [f"mask or sliding window: token {int(wrong.argmax())} is the first that differs; or the scale of attention"]


def _router_logits(got: Floats, want: Floats) -> list[str]:
    if pairs := moved(got, want, 1):
        return [f"expert order in the router: {_pairs('expert', pairs)}"]
    if is_offset(got, want):
        return ["bias of the router missing or wrong: every token has the same offset"]
    if relative_gap(got, want) < _BFLOAT16:
        return ["router dtype: the difference is that of 16-bit rounding"]
    return ["router weight"]


def _router_weights(got: Floats, want: Floats, logits: Floats) -> list[str]:
    """Look at which experts were chosen and at the weights of those that both chose, [tokens, num_experts]."""
    is_common, is_changed = (got != 0) & (want != 0), (got != 0) != (want != 0)
    common, expected = got * is_common, want * is_common
    gap = relative_gap(common, expected)
    if not is_changed.any():
        if (factor := constant_factor(got, want)) is not None:
            return [f"routed scaling factor: all weights are {factor:.6g} times the expected"]
        if factor_along(got, want, (1,)) is not None:
            return ["normalisation of the top-k weights: the choice is right, every token has its own factor"]
        return ["score function (softmax or sigmoid): the choice is right, the weights are not"]
    if _are_ties(logits, is_changed):
        return ["a tie: rounding chose other experts where router logits are equal"]
    if gap < _ROUNDING or factor_along(common, expected, (1,)) is not None:
        return [
            "correction bias of the router missing or wrong, or limits on expert groups: weights follow the score function, but "
            f"{int(is_changed.any(axis=1).sum())} of {len(got)} tokens go to other experts"
        ]
    return ["score function (softmax or sigmoid): experts chosen by both have other weights"]


def _are_ties(logits: Floats, is_changed: Floats) -> bool:
    tokens = is_changed.any(axis=1)
    spread = np.where(is_changed, logits, -np.inf).max(axis=1) - np.where(is_changed, logits, np.inf).min(axis=1)
    return bool((spread[tokens] < _ROUNDING * np.abs(logits).max()).all())


def _experts(got: Floats, want: Floats) -> list[str]:
    if pairs := moved(got, want, 0):
        return [f"expert order: {_pairs('expert', pairs)}"]
    wrong = np.abs(got - want).max(axis=1) > _ROUNDING * np.abs(want).max()
    return [
        f"weights, biases, activation or order of gate and up in {int(wrong.sum())} of {len(got)} experts, "
        f"the first is {int(wrong.argmax())}"
    ]


def _mlp(got: Floats, want: Floats) -> list[str]:
    if (factor := constant_factor(got, want)) is not None:
        return [f"scaling of the output: {factor:.6g} times the expected"]
    return ["in a mixture of experts the shared expert or its gate; else weights, activation, or order of gate and up"]


def _linear(got: Floats, want: Floats) -> list[str]:
    if is_offset(got, want):
        return ["bias missing or wrong: every token has the same offset"]
    if (factor := constant_factor(got, want)) is not None:
        return [f"scaling: {factor:.6g} times the expected"]
    return ["weight, or the order of its rows or columns"]


def _residual(got: Floats, want: Floats) -> list[str]:
    return ["residual connection: everything that is added up agrees, the sum does not"]


def _pairs(what: str, pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{what} {got} computes what {what} {want} should" for got, want in pairs[:3])
    return shown + (f", and {len(pairs) - 3} more" if len(pairs) > 3 else "")


_PROBES: dict[Operator, Callable[[Floats, Floats], list[str]]] = {
    Operator.INPUT_NORM: _norm,
    Operator.VALUES: _values,
    Operator.PRODUCTS: _products,
    Operator.SCORES: _scores,
    Operator.CORE_ATTENTION: _core_attention,
    Operator.POST_ATTENTION_NORM: _norm,
    Operator.ROUTER_LOGITS: _router_logits,
    Operator.EXPERTS: _experts,
    Operator.MLP: _mlp,
    Operator.LAYER: _residual,
    Operator.FINAL_NORM: _norm,
}
