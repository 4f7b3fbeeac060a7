"""GPT-OSS, in the layout of bfloat16 checkpoints; MXFP4 blocks have to be dequantised first.

Source: transformers ``models/gpt_oss`` (names, shapes, defaults; alternate columns of ``gate_up_proj``).
"""

from __future__ import annotations

from hybridrl.layout.attention import GqaAttention
from hybridrl.layout.families.decoder import decoder_spec, gqa, num_experts
from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.mlp import ExpertActivation, ExpertStorage, MoeMlp
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.rope import YarnScaling, yarn_mscale

_WINDOW = 128
_ROPE_SCALING = YarnScaling(
    factor=32.0,
    original_max_positions=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    attention_factor=yarn_mscale(32.0, 1.0),
    softmax_mscale=0.0,
    is_truncated=False,
)


def moe_spec(fields: HfFields) -> ModelSpec:
    """Declare a GPT-OSS model."""
    has_bias = fields.boolean("attention_bias", True)
    window = fields.integer("sliding_window", _WINDOW)
    kinds = fields.strings("layer_types")

    def attention(prefix: str, index: int) -> GqaAttention:
        # Without a list every other layer slides, beginning with the first.
        is_sliding = kinds[index] == "sliding_attention" if kinds else index % 2 == 0
        return gqa(
            fields,
            prefix,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_sinks=True,
            window=window if is_sliding else None,
            head_dim=64,
        )

    return decoder_spec(
        fields, attention=attention, mlp=lambda layer, _: _experts(fields, layer), rope_scaling=_ROPE_SCALING
    )


def _experts(fields: HfFields, layer: str) -> MoeMlp:
    fields.require("swiglu_alpha", fields.number("swiglu_alpha", 1.702), 1.702)
    return MoeMlp(
        prefix=f"{layer}.mlp",
        router=f"{layer}.mlp.router.weight",
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_experts=num_experts(fields),
        num_experts_per_token=fields.integer(fields.present("num_experts_per_tok", "experts_per_token")),
        is_topk_normalized=True,
        storage=ExpertStorage.STACKED,
        activation=ExpertActivation.CLAMPED_SWIGLU,
        activation_limit=fields.number("swiglu_limit", 7.0),
        router_bias=f"{layer}.mlp.router.bias",
    )
