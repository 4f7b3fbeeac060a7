"""GPT-OSS, in the layout of bfloat16 checkpoints; MXFP4 blocks have to be dequantised first.

Source: transformers ``models/gpt_oss`` (names, shapes, defaults; alternate columns of ``gate_up_proj``).
"""

from __future__ import annotations

from hybridrl.layout.attention import GqaAttention
from hybridrl.layout.families.decoder import decoder_spec, gqa, num_experts
from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.mlp import ExpertActivation, ExpertStorage, MoeMlp
from hybridrl.layout.model import ModelSpec

_WINDOW = 128


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
        fields, attention=attention, mlp=lambda layer, _: _experts(fields, layer), has_rope_scaling=True
    )


def _experts(fields: HfFields, layer: str) -> MoeMlp:
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
        router_bias=f"{layer}.mlp.router.bias",
    )
