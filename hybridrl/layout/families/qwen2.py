"""Qwen2 and Qwen2.5, dense and mixture of experts.

Source: transformers ``models/qwen2`` and ``models/qwen2_moe`` (names, shapes, defaults).
"""

from __future__ import annotations

from hybridrl.layout.families.decoder import decoder_spec, dense_mlp, gqa, num_experts, refuse_sliding_window
from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.mlp import GatedMlp, MoeMlp
from hybridrl.layout.model import ModelSpec


def dense_spec(fields: HfFields) -> ModelSpec:
    """Declare a dense Qwen2 or Qwen2.5 model."""
    refuse_sliding_window(fields)
    return decoder_spec(
        fields,
        attention=lambda prefix, _: gqa(fields, prefix, has_qkv_bias=True),
        mlp=lambda layer, _: dense_mlp(fields, layer),
    )


def moe_spec(fields: HfFields) -> ModelSpec:
    """Declare a Qwen2 mixture-of-experts model, with a gated shared expert per sparse layer."""
    refuse_sliding_window(fields)
    has_bias = fields.boolean("qkv_bias", True)
    fields.ignore("intermediate_size")  # of dense layers, which there need not be
    return decoder_spec(
        fields,
        attention=lambda prefix, _: gqa(fields, prefix, has_qkv_bias=has_bias),
        mlp=lambda layer, index: _experts(fields, layer) if is_sparse(fields, index) else dense_mlp(fields, layer),
    )


def is_sparse(fields: HfFields, index: int) -> bool:
    """Whether a layer of a Qwen mixture has experts."""
    step = fields.integer("decoder_sparse_step", 1)
    return index not in fields.integers("mlp_only_layers") and (index + 1) % step == 0


def _experts(fields: HfFields, layer: str) -> MoeMlp:
    hidden = fields.integer("hidden_size")
    shared_size = fields.integer("shared_expert_intermediate_size")
    return MoeMlp(
        prefix=f"{layer}.mlp",
        router=f"{layer}.mlp.gate.weight",
        hidden_size=hidden,
        intermediate_size=fields.integer("moe_intermediate_size"),
        num_experts=num_experts(fields),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        is_topk_normalized=fields.boolean("norm_topk_prob", False),
        shared=GatedMlp(f"{layer}.mlp.shared_expert", hidden, shared_size),
        shared_gate=f"{layer}.mlp.shared_expert_gate.weight",
    )
