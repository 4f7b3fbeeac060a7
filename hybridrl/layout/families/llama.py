"""Llama, dense.

Source: transformers ``models/llama`` (names, shapes, defaults).
"""

from __future__ import annotations

from hybridrl.layout.families.decoder import decoder_spec, dense_mlp, gqa
from hybridrl.layout.families.fields import HfFields
from hybridrl.layout.model import ModelSpec


def dense_spec(fields: HfFields) -> ModelSpec:
    """Declare a Llama model."""
    fields.require("mlp_bias", fields.boolean("mlp_bias", False), False)
    has_bias = fields.boolean("attention_bias", False)
    return decoder_spec(
        fields,
        attention=lambda prefix, _: gqa(fields, prefix, has_qkv_bias=has_bias, has_output_bias=has_bias),
        mlp=lambda layer, _: dense_mlp(fields, layer),
    )
