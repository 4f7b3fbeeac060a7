"""Each pattern of a difference leads to its cause, on arrays small enough to see through."""

from __future__ import annotations

import numpy as np
import pytest

from hybridrl.parity.activations import Activations, Operator, Site
from hybridrl.parity.causes import likely_causes
from hybridrl.parity.patterns import constant_factor, factor_along, is_offset, moved

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((6, 8)).astype(np.float32)
HEADS = RNG.standard_normal((6, 3, 4)).astype(np.float32)
KEYS = RNG.standard_normal((6, 3, 4)).astype(np.float32)
LOGITS = RNG.standard_normal((6, 8)).astype(np.float32)
CHANNELS = np.arange(1, 9, dtype=np.float32)


def causes(operator: Operator, got: np.ndarray, want: np.ndarray, logits: np.ndarray = LOGITS) -> str:
    site = Site(operator, 0)
    return likely_causes(
        site, Activations({site: got}), Activations({Site(Operator.ROUTER_LOGITS, 0): logits, site: want})
    )[0]


def products(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    kept = Activations()
    kept.add_attention(0, query, key, key, None)
    return kept.values[Site(Operator.PRODUCTS, 0)]


def routed(scores: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Normalised weights of chosen experts."""
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, np.take_along_axis(scores, chosen, 1), 1)
    return weights / weights.sum(axis=1, keepdims=True)


SOFTMAX, SIGMOID = np.exp(LOGITS), 1 / (1 + np.exp(-LOGITS))
TOP = np.argsort(-LOGITS, axis=1)[:, :3]
OTHERS = np.concatenate([TOP[:, :2], np.argsort(-LOGITS, axis=1)[:, 3:4]], axis=1)


@pytest.mark.parametrize(
    ("operator", "got", "want", "cause"),
    [
        (Operator.EMBEDDING, ROWS * 8, ROWS, "scaling: 8 times"),
        (
            Operator.INPUT_NORM,
            ROWS * np.arange(1, 7)[:, None],
            ROWS,
            "norm epsilon: every token has its own factor, 1 to 6",
        ),
        (Operator.FINAL_NORM, ROWS * CHANNELS, ROWS, "norm weight"),
        (Operator.FINAL_NORM, ROWS - ROWS.mean(axis=1, keepdims=True), ROWS, "kind of norm"),
        (
            Operator.VALUES,
            HEADS[:, [1, 0, 2]],
            HEADS,
            "order of key and value heads: head 0 computes what head 1 should",
        ),
        (Operator.VALUES, HEADS + KEYS[:1], HEADS, "bias missing or wrong"),
        (Operator.PRODUCTS, products(HEADS * 2, KEYS), products(HEADS, KEYS), "scale of queries or keys"),
        (
            Operator.PRODUCTS,
            products(HEADS, KEYS)[[2, 0, 1]],
            products(HEADS, KEYS),
            "order of attention heads: head 0",
        ),
        (Operator.PRODUCTS, products(KEYS, KEYS), products(HEADS, KEYS), "query or key projection"),
        (Operator.SCORES, HEADS / 4, HEADS, "attention scale: 0.25 times"),
        (Operator.CORE_ATTENTION, ROWS + 1, ROWS, "attention sinks"),
        (
            Operator.CORE_ATTENTION,
            ROWS * np.array([[1], [1], [1], [2], [3], [4]]),
            ROWS,
            "mask or sliding window: token 3",
        ),
        (
            Operator.ROUTER_LOGITS,
            ROWS[:, ::-1],
            ROWS,
            "expert order in the router: expert 0 computes what expert 7 should",
        ),
        (Operator.ROUTER_LOGITS, ROWS + CHANNELS, ROWS, "bias of the router"),
        (Operator.ROUTER_LOGITS, ROWS + 1e-3 * LOGITS, ROWS, "router dtype"),
        (Operator.ROUTER_LOGITS, LOGITS, ROWS, "router weight"),
        (Operator.ROUTER_WEIGHTS, routed(SIGMOID, TOP), routed(SOFTMAX, TOP), "score function"),
        (Operator.ROUTER_WEIGHTS, routed(SIGMOID, OTHERS), routed(SOFTMAX, TOP), "score function"),
        (Operator.ROUTER_WEIGHTS, routed(SOFTMAX, OTHERS), routed(SOFTMAX, TOP), "correction bias of the router"),
        (
            Operator.ROUTER_WEIGHTS,
            routed(SOFTMAX, TOP) * 2.5,
            routed(SOFTMAX, TOP),
            "routed scaling factor: all weights are 2.5",
        ),
        (
            Operator.ROUTER_WEIGHTS,
            routed(SOFTMAX, TOP) * ROWS[:, :1],
            routed(SOFTMAX, TOP),
            "normalisation of the top-k",
        ),
        (Operator.EXPERTS, ROWS[[0, 2, 1, 3, 4, 5]], ROWS, "expert order: expert 1 computes what expert 2 should"),
        (
            Operator.EXPERTS,
            ROWS * np.array([[1], [1], [1], [0], [1], [0]]),
            ROWS,
            "weights, biases, activation or order of gate and up in 2 of 6 experts, the first is 3",
        ),
        (Operator.MLP, ROWS * 16, ROWS, "scaling of the output: 16 times"),
        (Operator.MLP, LOGITS, ROWS, "in a mixture of experts the shared expert"),
        (Operator.LAYER, ROWS * 2, ROWS, "residual connection"),
        (Operator.LOGITS, ROWS[:, ::-1], ROWS, "weight, or the order of its rows"),
        (Operator.LOGITS, ROWS[:, :4], ROWS, "shapes differ: got (6, 4), expected (6, 8)"),
        (Operator.LOGITS, ROWS * np.nan, ROWS, "got values that are not numbers"),
    ],
)
def test_a_difference_leads_to_its_cause(operator: Operator, got: np.ndarray, want: np.ndarray, cause: str) -> None:
    assert causes(operator, got, want).startswith(cause)


def test_other_experts_on_equal_logits_are_a_tie() -> None:
    assert causes(
        Operator.ROUTER_WEIGHTS, routed(SOFTMAX, OTHERS), routed(SOFTMAX, TOP), np.ones_like(LOGITS)
    ).startswith("a tie")


def test_a_rotation_by_other_angles_is_the_rotary_embedding() -> None:
    def rotated(pairs: np.ndarray, theta: float) -> np.ndarray:
        turn = np.exp(1j * np.arange(6)[:, None] * theta ** -np.arange(2))[:, None]
        turned = (pairs[..., :2] + 1j * pairs[..., 2:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1).astype(np.float32)

    got, want = (products(rotated(HEADS, theta), rotated(KEYS, theta)) for theta in (100.0, 10.0))
    assert causes(Operator.PRODUCTS, got, want).startswith("rotary embedding")


def test_patterns_are_not_seen_in_noise() -> None:
    assert constant_factor(LOGITS, ROWS) is None
    assert factor_along(LOGITS, ROWS, (0,)) is None
    assert factor_along(LOGITS, ROWS, (1,)) is None
    assert not is_offset(LOGITS, ROWS)
    assert moved(LOGITS, ROWS, 0) == []
