"""What a sequence costs to train on, for balancing: multiplications per token, and those that grow with the length.

A token passes every matrix once, and attends to the tokens before it: a sequence of s tokens costs ``linear * s +
quadratic * s ** 2`` multiplications in a forward pass, and a backward pass is a constant factor of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrl.layout.attention import GqaAttention, MlaAttention
from hybridrl.layout.mlp import GatedMlp, MoeMlp
from hybridrl.layout.model import ModelSpec


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Multiplications of a forward pass.

    Attributes:
        linear: Per token: matrix elements that it meets.
        quadratic: Per squared token: causal scores and weighted values, half of a square each.
    """

    linear: float
    quadratic: float

    def __call__(self, lengths: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return the cost of sequences of [num_samples] tokens."""
        tokens = lengths.astype(np.float64)
        return self.linear * tokens + self.quadratic * tokens**2


def sequence_cost(spec: ModelSpec) -> SequenceCost:
    """Return the cost of sequences under a model."""
    outputs = spec.value_head.num_labels if spec.value_head else spec.vocab_size
    projections = sum(2 * spec.hidden_size for _ in spec.mtp_layers)
    linear = float(spec.hidden_size * (outputs * (1 + len(spec.mtp_layers)) + projections))
    quadratic = 0.0
    for layer in (*spec.layers, *(mtp.layer for mtp in spec.mtp_layers)):
        linear += _attention_linear(layer.attention) + _mlp_linear(layer.mlp)
        quadratic += _attention_quadratic(layer.attention)
    return SequenceCost(linear, quadratic)


def _attention_linear(attention: GqaAttention | MlaAttention) -> int:
    return sum(int(np.prod(tensor.shape)) for tensor in attention.tensors() if len(tensor.shape) == 2)


def _attention_quadratic(attention: GqaAttention | MlaAttention) -> float:
    if isinstance(attention, GqaAttention):
        return attention.num_heads * attention.head_dim
    return attention.num_heads * (attention.query_rows_per_head + attention.v_head_dim) / 2


def _mlp_linear(mlp: GatedMlp | MoeMlp) -> int:
    if isinstance(mlp, GatedMlp):
        return 3 * mlp.hidden_size * mlp.intermediate_size
    shared = mlp.shared
    active = mlp.num_experts_per_token * mlp.intermediate_size + (shared.intermediate_size if shared else 0)
    return mlp.hidden_size * (3 * active + mlp.num_experts)
