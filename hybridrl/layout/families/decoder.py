"""What the families share: names and fields that nearly all Hugging Face decoder models have in common."""

from __future__ import annotations

from collections.abc import Callable

from hybridrl.layout.attention import GqaAttention, MlaAttention
from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.families.rope import read_rope
from hybridrl.layout.mlp import GatedMlp, MoeMlp
from hybridrl.layout.model import DecoderLayer, ModelSpec, MtpLayer
from hybridrl.layout.rope import RopeScaling

AttentionOf = Callable[[str, int], GqaAttention | MlaAttention]
MlpOf = Callable[[str, int], GatedMlp | MoeMlp]


def decoder_spec(
    fields: HfFields,
    *,
    attention: AttentionOf,
    mlp: MlpOf,
    rotary_fraction: float = 1.0,
    rope_scaling: RopeScaling | None = None,
    num_mtp_layers: int = 0,
) -> ModelSpec:
    """Declare a model from the parts of its layers.

    Args:
        attention: (prefix of the attention, layer index) -> attention.
        mlp: (prefix of the layer, layer index) -> feed-forward part.
        rotary_fraction: Part of each head that rotates when the file does not say.
        rope_scaling: Scaling of the rotary embedding when the file does not say.
        num_mtp_layers: Layers after the last that predict further tokens.
    """
    fields.require("hidden_act", fields.string("hidden_act", "silu"), "silu")
    num_layers = fields.integer("num_hidden_layers")
    layers = [_layer(index, attention, mlp) for index in range(num_layers + num_mtp_layers)]
    return ModelSpec(
        family=fields.string("model_type"),
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        max_positions=fields.integer("max_position_embeddings"),
        rope=read_rope(fields, rotary_fraction, rope_scaling),
        norm_epsilon=fields.number("rms_norm_eps"),
        is_tied=fields.boolean("tie_word_embeddings", False),
        embedding="model.embed_tokens.weight",
        final_norm="model.norm.weight",
        output="lm_head.weight",
        layers=tuple(layers[:num_layers]),
        mtp_layers=tuple(MtpLayer.of(layer) for layer in layers[num_layers:]),
    )


def gqa(
    fields: HfFields,
    prefix: str,
    *,
    has_qkv_bias: bool = False,
    has_qk_norm: bool = False,
    has_output_bias: bool = False,
    has_sinks: bool = False,
    window: int | None = None,
    head_dim: int | None = None,
) -> GqaAttention:
    """Read the sizes of a grouped-query attention; `head_dim` is the family's default, else hidden size over heads."""
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return GqaAttention(
        prefix=prefix,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", head_dim or hidden // num_heads),
        has_qkv_bias=has_qkv_bias,
        has_qk_norm=has_qk_norm,
        has_output_bias=has_output_bias,
        has_sinks=has_sinks,
        window=window,
    )


def dense_mlp(fields: HfFields, layer: str) -> GatedMlp:
    """Read a dense SwiGLU MLP."""
    return GatedMlp(f"{layer}.mlp", fields.integer("hidden_size"), fields.integer("intermediate_size"))


def num_experts(fields: HfFields) -> int:
    """Read the number of experts; transformers 5 writes it under another name than the checkpoints have."""
    return fields.integer(fields.present("num_experts", "num_local_experts"))


def refuse_sliding_window(fields: HfFields) -> None:
    """Refuse Qwen models whose sliding window is on; while it is off its size means nothing."""
    fields.require("use_sliding_window", fields.boolean("use_sliding_window", False), False)
    fields.require("layer_types", set(fields.strings("layer_types")) - {"full_attention"}, set())
    fields.ignore("sliding_window", "max_window_layers")


def _layer(index: int, attention: AttentionOf, mlp: MlpOf) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    return DecoderLayer(
        index=index,
        prefix=prefix,
        input_norm=f"{prefix}.input_layernorm.weight",
        attention=attention(f"{prefix}.self_attn", index),
        post_attention_norm=f"{prefix}.post_attention_layernorm.weight",
        mlp=mlp(prefix, index),
    )
