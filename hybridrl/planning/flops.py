"""Floating-point operations per token, in the convention in which model FLOP/s are published.

A matrix element that a token meets costs a multiplication and an addition forward, and twice that backward. Attention is causal: a
token of a sequence of s tokens meets s / 2 keys on average. The router is left out, as Megatron-LM leaves it out.

Source: Megatron-LM, megatron/training/training.py (num_floating_point_operations).
"""

from __future__ import annotations

from hybridrl.layout.cost import sequence_cost
from hybridrl.layout.model import ModelSpec, MoeMlp

_FORWARD, _BACKWARD = 2, 4


def forward_flops(spec: ModelSpec, sequence_tokens: float) -> float:
    """Return the operations per token of a forward pass over sequences of so many tokens."""
    layers = (*spec.layers, *(mtp.layer for mtp in spec.mtp_layers))
    router = sum(mlp.hidden_size * mlp.num_experts for layer in layers if isinstance(mlp := layer.mlp, MoeMlp))
    cost = sequence_cost(spec)
    return _FORWARD * (cost.linear - router + cost.quadratic * sequence_tokens)


def training_flops(spec: ModelSpec, sequence_tokens: float) -> float:
    """Return the operations per token of a forward and a backward pass; recomputation does not count."""
    return forward_flops(spec, sequence_tokens) * (_FORWARD + _BACKWARD) / _FORWARD
