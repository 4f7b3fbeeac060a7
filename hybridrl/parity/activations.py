"""What an implementation of a model computes, operator by operator: what two implementations are compared by.

Operators are cut where both sides must agree whatever their layouts. Queries and keys are kept as their products, since
implementations may order the rotating dimensions of a head differently.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Operator(enum.Enum):
    """A point of comparison; members are in the order in which a model computes them."""

    EMBEDDING = "embedding"
    INPUT_NORM = "input norm"
    VALUES = "values"
    PRODUCTS = "query-key products"
    SCORES = "attention scores"
    CORE_ATTENTION = "core attention"
    ATTENTION = "attention output"
    POST_ATTENTION_NORM = "post-attn norm"
    ROUTER_LOGITS = "router logits"
    ROUTER_WEIGHTS = "router weights"
    EXPERTS = "experts"
    MLP = "MLP output"
    LAYER = "layer output"
    FINAL_NORM = "final norm"
    LOGITS = "logits"


_ORDER = {operator: index for index, operator in enumerate(Operator)}
_BEFORE_LAYERS, _AFTER_LAYERS = {Operator.EMBEDDING}, {Operator.FINAL_NORM, Operator.LOGITS}


@dataclass(frozen=True, slots=True)
class Site:
    """An operator of a layer; `layer` is None for those outside of layers."""

    operator: Operator
    layer: int | None = None

    def __str__(self) -> str:
        return self.operator.value if self.layer is None else f"layer {self.layer}, {self.operator.value}"

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: the order of computation."""
        part = 0 if self.operator in _BEFORE_LAYERS else 2 if self.operator in _AFTER_LAYERS else 1
        return part, -1 if self.layer is None else self.layer, _ORDER[self.operator]


@dataclass(frozen=True, slots=True)
class Activations:
    """Results of one forward pass over one sequence.

    Attributes:
        values: Outputs [tokens, width] float32, but for: values [tokens, kv_heads, value_dim]; products and scores
            [heads, tokens, tokens], 0 where a key comes after its query; experts [num_experts, hidden], what each makes of
            the last token.
    """

    values: dict[Site, Floats] = field(default_factory=dict)

    def add(self, operator: Operator, layer: int | None, output: Floats) -> None:
        """Keep the output of an operator, [..., tokens, 1 or none, width], as [tokens, width]."""
        self.values[Site(operator, layer)] = output.reshape(-1, output.shape[-1])

    def add_attention(self, layer: int, query: Floats, key: Floats, value: Floats, scale: float | None) -> None:
        """Keep what enters core attention.

        Args:
            query: [tokens, heads, key_dim], rotated.
            key: [tokens, kv_heads, key_dim], rotated.
            value: [tokens, kv_heads, value_dim].
            scale: Factor of the products; None when the implementation does not tell.
        """
        keys = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
        products = np.tril(np.einsum("qhd,khd->hqk", query, keys))
        self.values[Site(Operator.VALUES, layer)] = value
        self.values[Site(Operator.PRODUCTS, layer)] = products
        if scale is not None:
            self.values[Site(Operator.SCORES, layer)] = products * np.float32(scale)
