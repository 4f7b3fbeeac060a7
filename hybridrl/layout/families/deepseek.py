"""DeepSeek-V2, DeepSeek-V3 and models with the latter's architecture, such as Moonlight.

Source: transformers ``models/deepseek_v2`` and ``models/deepseek_v3`` (names, shapes, defaults).
"""

from __future__ import annotations

from hybridrl.layout.attention import MlaAttention
from hybridrl.layout.families.decoder import decoder_spec, dense_mlp
from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.mlp import GatedMlp, MoeMlp, RouterScoring
from hybridrl.layout.model import ModelSpec


def v2_spec(fields: HfFields) -> ModelSpec:
    """Declare a DeepSeek-V2 model: softmax scores."""
    fields.require("scoring_func", fields.string("scoring_func", "softmax"), "softmax")
    return _spec(fields, RouterScoring.SOFTMAX, has_mtp=False)


def v3_spec(fields: HfFields, *, has_mtp: bool = False) -> ModelSpec:
    """Declare a DeepSeek-V3 model: sigmoid scores and a correction bias for the choice of experts."""
    fields.require("scoring_func", fields.string("scoring_func", "sigmoid"), "sigmoid")
    fields.require("topk_method", fields.string("topk_method", "noaux_tc"), "noaux_tc")
    return _spec(fields, RouterScoring.SIGMOID, has_mtp=has_mtp)


def mtp_layers(fields: HfFields, has_mtp: bool) -> int:
    """Return how many multi-token-prediction layers to declare."""
    return fields.integer("num_nextn_predict_layers", 0) if has_mtp else 0


def routed_experts(
    fields: HfFields, layer: str, scoring: RouterScoring, *, has_correction_bias: bool, is_router_float32: bool = False
) -> MoeMlp:
    """Read a mixture with shared experts in the fields' names that DeepSeek and GLM have in common."""
    hidden, size = fields.integer("hidden_size"), fields.integer("moe_intermediate_size")
    num_shared = fields.optional_integer("n_shared_experts") or 0
    prefix = f"{layer}.mlp"
    return MoeMlp(
        prefix=prefix,
        router=f"{prefix}.gate.weight",
        hidden_size=hidden,
        intermediate_size=size,
        num_experts=fields.integer(fields.present("n_routed_experts", "num_local_experts")),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        is_topk_normalized=fields.boolean("norm_topk_prob", False),
        shared=GatedMlp(f"{prefix}.shared_experts", hidden, size * num_shared) if num_shared else None,
        correction_bias=f"{prefix}.gate.e_score_correction_bias" if has_correction_bias else None,
        scoring=scoring,
        num_groups=fields.optional_integer("n_group") or 1,
        num_groups_per_token=fields.optional_integer("topk_group") or 1,
        routed_scaling=fields.number("routed_scaling_factor", 1.0),
        is_router_float32=is_router_float32,
    )


def _spec(fields: HfFields, scoring: RouterScoring, *, has_mtp: bool) -> ModelSpec:
    fields.require("attention_bias", fields.boolean("attention_bias", False), False)
    fields.require("moe_layer_freq", fields.integer("moe_layer_freq", 1), 1)
    first_sparse = fields.integer("first_k_dense_replace", 0)
    has_bias = scoring is RouterScoring.SIGMOID

    def mlp(layer: str, index: int) -> GatedMlp | MoeMlp:
        if index < first_sparse:
            return dense_mlp(fields, layer)
        return routed_experts(fields, layer, scoring, has_correction_bias=has_bias)

    return decoder_spec(
        fields,
        attention=lambda prefix, _: _mla(fields, prefix),
        mlp=mlp,
        has_rope_scaling=True,
        num_mtp_layers=mtp_layers(fields, has_mtp),
    )


def _mla(fields: HfFields, prefix: str) -> MlaAttention:
    return MlaAttention(
        prefix=prefix,
        hidden_size=fields.integer("hidden_size"),
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )
