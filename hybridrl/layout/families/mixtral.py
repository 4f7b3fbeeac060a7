"""Mixtral.

Source: transformers ``models/mixtral`` and ``conversion_mapping.py``: modules hold fused experts under ``mlp``, files keep
``block_sparse_moe.experts.{e}.w1`` (gate), ``w3`` (up) and ``w2`` (down).
"""

from __future__ import annotations

from hybridrl.layout.families.decoder import decoder_spec, gqa, num_experts
from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.mlp import MoeMlp, Projections
from hybridrl.layout.model import ModelSpec

_PROJECTIONS = Projections(gate="w1", up="w3", down="w2")


def moe_spec(fields: HfFields) -> ModelSpec:
    """Declare a Mixtral model."""
    window = fields.optional_integer("sliding_window")
    return decoder_spec(
        fields,
        attention=lambda prefix, _: gqa(fields, prefix, window=window),
        mlp=lambda layer, _: _experts(fields, layer),
    )


def _experts(fields: HfFields, layer: str) -> MoeMlp:
    return MoeMlp(
        prefix=f"{layer}.block_sparse_moe",
        router=f"{layer}.block_sparse_moe.gate.weight",
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_experts=num_experts(fields),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        is_topk_normalized=True,
        projections=_PROJECTIONS,
    )
