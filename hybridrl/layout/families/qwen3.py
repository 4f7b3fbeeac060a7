"""Qwen3, dense and mixture of experts.

Source: transformers ``models/qwen3`` and ``models/qwen3_moe`` (names, shapes, defaults).
"""

from __future__ import annotations

from hybridrl.layout.families.decoder import MlpOf, decoder_spec, dense_mlp, gqa, num_experts, refuse_sliding_window
from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.families.qwen2 import is_sparse
from hybridrl.layout.mlp import MoeMlp
from hybridrl.layout.model import ModelSpec


def dense_spec(fields: HfFields) -> ModelSpec:
    """Declare a dense Qwen3 model."""
    return _spec(fields, lambda layer, _: dense_mlp(fields, layer))


def moe_spec(fields: HfFields) -> ModelSpec:
    """Declare a Qwen3 mixture-of-experts model."""
    fields.ignore("intermediate_size")  # of dense layers, which there need not be
    return _spec(
        fields,
        lambda layer, index: _experts(fields, layer) if is_sparse(fields, index) else dense_mlp(fields, layer),
    )


def _spec(fields: HfFields, mlp: MlpOf) -> ModelSpec:
    refuse_sliding_window(fields)
    fields.require("attention_bias", fields.boolean("attention_bias", False), False)
    return decoder_spec(
        fields, attention=lambda prefix, _: gqa(fields, prefix, has_qk_norm=True, head_dim=128), mlp=mlp
    )


def _experts(fields: HfFields, layer: str) -> MoeMlp:
    return MoeMlp(
        prefix=f"{layer}.mlp",
        router=f"{layer}.mlp.gate.weight",
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        num_experts=num_experts(fields),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        is_topk_normalized=fields.boolean("norm_topk_prob", False),
    )
