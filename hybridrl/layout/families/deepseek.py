"""DeepSeek-V2, DeepSeek-V3 and models with the latter's architecture, such as Moonlight.

Source: transformers ``models/deepseek_v2`` and ``models/deepseek_v3`` (names, shapes, defaults).
"""

from __future__ import annotations

from hybridrl.layout.attention import MlaAttention
from hybridrl.layout.families.decoder import MlpOf, decoder_spec, dense_mlp
from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.mlp import GatedMlp, MoeMlp, RouterScoring
from hybridrl.layout.model import ModelSpec

# The published code gives the norms of compressed queries, keys and values no epsilon: they have its default.
_LATENT_NORM_EPSILON = 1e-6


def v2_spec(fields: HfFields) -> ModelSpec:
    """Declare a DeepSeek-V2 model: softmax scores, never rescaled, and groups as good as their best expert."""
    fields.require("scoring_func", fields.string("scoring_func", "softmax"), "softmax")
    fields.require("norm_topk_prob", fields.boolean("norm_topk_prob", False), False)
    fields.require("mlp_bias", fields.boolean("mlp_bias", False), False)
    is_grouped = fields.string("topk_method", "greedy") != "greedy"
    if is_grouped:
        fields.require("topk_method", fields.string("topk_method"), "group_limited_greedy")
    else:
        fields.ignore("n_group", "topk_group")

    def experts(layer: str, _: int) -> MoeMlp:
        return routed_experts(fields, layer, RouterScoring.SOFTMAX, is_topk_normalized=False, is_grouped=is_grouped)

    return _spec(fields, experts, first_sparse=fields.integer("first_k_dense_replace", 0), num_mtp_layers=0)


def v3_spec(fields: HfFields, *, has_mtp: bool = False) -> ModelSpec:
    """Declare a DeepSeek-V3 model: sigmoid scores and a correction bias for the choice of experts."""
    fields.require("scoring_func", fields.string("scoring_func", "sigmoid"), "sigmoid")
    fields.require("topk_method", fields.string("topk_method", "noaux_tc"), "noaux_tc")
    fields.require("rope_interleave", fields.boolean("rope_interleave", True), True)

    def experts(layer: str, _: int) -> MoeMlp:
        return routed_experts(
            fields,
            layer,
            RouterScoring.SIGMOID,
            is_topk_normalized=True,
            is_grouped=True,
            num_scores_per_group=2,
            routed_scaling=2.5,
        )

    first_sparse = fields.integer("first_k_dense_replace", 3)
    return _spec(fields, experts, first_sparse=first_sparse, num_mtp_layers=mtp_layers(fields, has_mtp))


def mtp_layers(fields: HfFields, has_mtp: bool) -> int:
    """Return how many multi-token-prediction layers to declare."""
    num_layers = fields.integer(fields.present("num_nextn_predict_layers", "num_mtp_layers"), 0)
    return num_layers if has_mtp else 0


def routed_experts(
    fields: HfFields,
    layer: str,
    scoring: RouterScoring,
    *,
    is_topk_normalized: bool,
    is_grouped: bool,
    num_scores_per_group: int = 1,
    routed_scaling: float = 1.0,
    is_router_float32: bool = False,
) -> MoeMlp:
    """Read a mixture with shared experts in the fields' names that DeepSeek and GLM have in common.

    Args:
        is_topk_normalized: The family's default.
        routed_scaling: The family's default.
    """
    hidden, size = fields.integer("hidden_size"), fields.integer("moe_intermediate_size")
    num_shared = fields.integer("n_shared_experts")
    prefix = f"{layer}.mlp"
    has_bias = scoring is RouterScoring.SIGMOID
    return MoeMlp(
        prefix=prefix,
        router=f"{prefix}.gate.weight",
        hidden_size=hidden,
        intermediate_size=size,
        num_experts=fields.integer(fields.present("n_routed_experts", "num_local_experts")),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        is_topk_normalized=fields.boolean("norm_topk_prob", is_topk_normalized),
        shared=GatedMlp(f"{prefix}.shared_experts", hidden, size * num_shared) if num_shared else None,
        correction_bias=f"{prefix}.gate.e_score_correction_bias" if has_bias else None,
        scoring=scoring,
        num_groups=fields.integer("n_group") if is_grouped else 1,
        num_groups_per_token=fields.integer("topk_group") if is_grouped else 1,
        num_scores_per_group=num_scores_per_group,
        routed_scaling=fields.number("routed_scaling_factor", routed_scaling),
        is_router_float32=is_router_float32,
    )


def _spec(fields: HfFields, experts: MlpOf, *, first_sparse: int, num_mtp_layers: int) -> ModelSpec:
    fields.require("attention_bias", fields.boolean("attention_bias", False), False)
    fields.require("moe_layer_freq", fields.integer("moe_layer_freq", 1), 1)
    num_heads = fields.integer("num_attention_heads")
    fields.require("num_key_value_heads", fields.integer("num_key_value_heads", num_heads), num_heads)
    # Follow from the sizes that are read; and of layers that there need not be.
    fields.ignore("head_dim", "qk_head_dim", "intermediate_size")

    def mlp(layer: str, index: int) -> GatedMlp | MoeMlp:
        return dense_mlp(fields, layer) if index < first_sparse else experts(layer, index)

    return decoder_spec(
        fields, attention=lambda prefix, _: _mla(fields, prefix), mlp=mlp, num_mtp_layers=num_mtp_layers
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
        norm_epsilon=_LATENT_NORM_EPSILON,
    )
