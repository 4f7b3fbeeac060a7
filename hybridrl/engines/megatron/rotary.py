"""The rotary embedding of a model in Megatron-core's terms.

Plain, linear and Llama 3 embeddings are Megatron-core's ``RotaryEmbedding`` with the frequencies that transformers uses, since
its own scaling has fixed parameters; YaRN is its ``YarnRotaryEmbedding``. Latent attention makes its embedding itself, once
per layer, from the configuration.

Source: transformers ``modeling_rope_utils.py``; megatron-core ``models/common/embeddings``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.layout.attention import MlaAttention
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling, yarn_mscale


@dataclass
class YarnTransformerConfig(TransformerConfig):
    """A configuration with the YaRN fields that GPTModel and the attention look for."""

    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 1
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 0.0
    yarn_correction_range_round_to_int: bool = True


def yarn_fields(yarn: YarnScaling) -> dict[str, object]:
    """Return the fields of :class:`YarnTransformerConfig`."""
    return {
        "yarn_rotary_scaling_factor": yarn.factor,
        "yarn_original_max_position_embeddings": yarn.original_max_positions,
        "yarn_beta_fast": yarn.beta_fast,
        "yarn_beta_slow": yarn.beta_slow,
        "yarn_mscale": _mscale(yarn, 0.0),
        "yarn_mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": yarn.is_truncated,
    }


def latent_rope_fields(rope: Rope) -> dict[str, object]:
    """Return the fields of ``MLATransformerConfig`` that describe the rotary embedding."""
    yarn = rope.scaling
    if not isinstance(yarn, YarnScaling):
        return {"rope_type": "rope", "rotary_base": rope.theta, "rotary_scaling_factor": 1.0}
    return {
        "rope_type": "yarn",
        "rotary_base": rope.theta,
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": _mscale(yarn, yarn.softmax_mscale),
        "mscale_all_dim": yarn.softmax_mscale,
    }


def set_rotary_embeddings(chunk: GPTModel, spec: ModelSpec) -> None:
    """Give the rotary embeddings of a built model what their constructors do not take."""
    attention = spec.layers[0].attention
    head_dim = attention.qk_rope_head_dim if isinstance(attention, MlaAttention) else attention.head_dim
    for module in chunk.modules():
        if isinstance(module, YarnRotaryEmbedding):
            module.cp_group = chunk.pg_collection.cp
        elif isinstance(module, RotaryEmbedding) and spec.rope.scaling is not None:
            module.inv_freq = inverse_frequencies(spec.rope, head_dim).to(module.inv_freq.device)


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the angles per position of a plain, linear or Llama 3 embedding, [rotating dimensions / 2] float32."""
    dim = int(head_dim * rope.fraction)
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if isinstance(rope.scaling, LinearScaling):
        return plain / rope.scaling.factor
    if isinstance(rope.scaling, Llama3Scaling):
        return _llama3(plain, rope.scaling)
    assert rope.scaling is None, rope.scaling
    return plain


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Keep wavelengths that fit often into the original context, stretch those that hardly fit, blend in between."""
    rotations = scaling.original_max_positions * plain / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / scaling.factor


def _mscale(yarn: YarnScaling, all_dim: float) -> float:
    """Return the mscale with which Megatron-core's quotient of two mscales is the attention factor."""
    if yarn.factor <= 1:
        return 1.0
    return (yarn.attention_factor * yarn_mscale(yarn.factor, all_dim) - 1.0) / (0.1 * math.log(yarn.factor))
