"""GLM-4.5, mixture of experts.

Source: transformers ``models/glm4_moe`` (names, shapes, defaults).
"""

from __future__ import annotations

from hybridrl.layout.families.decoder import decoder_spec, dense_mlp, gqa
from hybridrl.layout.families.deepseek import mtp_layers, routed_experts
from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.mlp import GatedMlp, MoeMlp, RouterScoring
from hybridrl.layout.model import ModelSpec

_ROTARY_FRACTION = 0.5


def moe_spec(fields: HfFields, *, has_mtp: bool = False) -> ModelSpec:
    """Declare a GLM-4.5 mixture-of-experts model."""
    has_bias, has_norm = fields.boolean("attention_bias", False), fields.boolean("use_qk_norm", False)
    first_sparse = fields.integer("first_k_dense_replace", 1)

    def mlp(layer: str, index: int) -> GatedMlp | MoeMlp:
        if index < first_sparse:
            return dense_mlp(fields, layer)
        return routed_experts(
            fields,
            layer,
            RouterScoring.SIGMOID,
            is_topk_normalized=True,
            is_grouped=True,
            num_scores_per_group=2,
            is_router_float32=True,
        )

    return decoder_spec(
        fields,
        attention=lambda prefix, _: gqa(fields, prefix, has_qkv_bias=has_bias, has_qk_norm=has_norm, head_dim=128),
        mlp=mlp,
        rotary_fraction=_ROTARY_FRACTION,
        num_mtp_layers=mtp_layers(fields, has_mtp),
    )
