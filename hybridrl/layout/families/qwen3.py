"""Qwen3, dense and mixture of experts.

Source: transformers ``models/qwen3`` and ``models/qwen3_moe`` (names, shapes, defaults).
"""

from __future__ import annotations

from collections.abc import Callable

from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.model import DecoderLayer, GatedMlp, GqaAttention, ModelSpec, MoeMlp


def dense_spec(fields: HfFields) -> ModelSpec:
    """Declare a dense Qwen3 model."""
    hidden, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    return _spec(fields, "qwen3", lambda index: GatedMlp(f"model.layers.{index}.mlp", hidden, intermediate))


def moe_spec(fields: HfFields) -> ModelSpec:
    """Declare a Qwen3 mixture-of-experts model; every layer is sparse."""
    fields.require("decoder_sparse_step", fields.integer("decoder_sparse_step", 1), 1)
    fields.require_absent("mlp_only_layers")

    def mlp(index: int) -> MoeMlp:
        return MoeMlp(
            prefix=f"model.layers.{index}.mlp",
            router=f"model.layers.{index}.mlp.gate.weight",
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("moe_intermediate_size"),
            num_experts=fields.integer(
                fields.present("num_experts", "num_local_experts")
            ),  # transformers 5 writes the latter
            num_experts_per_token=fields.integer("num_experts_per_tok"),
            is_topk_normalized=fields.boolean("norm_topk_prob", False),
        )

    return _spec(fields, "qwen3_moe", mlp)


def _spec(fields: HfFields, family: str, mlp: Callable[[int], GatedMlp | MoeMlp]) -> ModelSpec:
    hidden = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    rope = fields.section("rope_parameters") or fields
    fields.require_absent("rope_scaling")
    fields.require("rope_type", rope.string("rope_type", "default"), "default")
    fields.require("use_sliding_window", fields.boolean("use_sliding_window", False), False)
    fields.require("attention_bias", fields.boolean("attention_bias", False), False)
    fields.require("hidden_act", fields.string("hidden_act", "silu"), "silu")
    layers = tuple(
        DecoderLayer(
            index=index,
            prefix=f"model.layers.{index}",
            input_norm=f"model.layers.{index}.input_layernorm.weight",
            attention=GqaAttention(
                prefix=f"model.layers.{index}.self_attn",
                hidden_size=hidden,
                num_heads=num_heads,
                num_kv_heads=fields.integer("num_key_value_heads", num_heads),
                head_dim=fields.integer("head_dim", 128),
                has_qkv_bias=False,
                has_qk_norm=True,
            ),
            post_attention_norm=f"model.layers.{index}.post_attention_layernorm.weight",
            mlp=mlp(index),
        )
        for index in range(fields.integer("num_hidden_layers"))
    )
    return ModelSpec(
        family=family,
        hidden_size=hidden,
        vocab_size=fields.integer("vocab_size"),
        max_positions=fields.integer("max_position_embeddings"),
        rope_theta=rope.number("rope_theta"),
        norm_epsilon=fields.number("rms_norm_eps"),
        is_tied=fields.boolean("tie_word_embeddings", False),
        embedding="model.embed_tokens.weight",
        final_norm="model.norm.weight",
        output="lm_head.weight",
        layers=layers,
    )
