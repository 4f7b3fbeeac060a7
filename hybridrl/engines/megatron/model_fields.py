"""From a model spec to the fields of Megatron-core's configuration that describe the model.

The configuration is one for all layers, so what the spec says per layer must agree but for the choice of dense MLP or
experts and for which layers slide.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from hybridrl.engines.megatron.rotary import latent_rope_fields, yarn_fields
from hybridrl.errors import EngineError
from hybridrl.layout.features import training_obstacles
from hybridrl.layout.mlp import ExpertActivation, ExpertStorage, RouterScoring
from hybridrl.layout.model import GatedMlp, GqaAttention, MlaAttention, ModelSpec, MoeMlp
from hybridrl.layout.rope import YarnScaling

T = TypeVar("T")


def model_fields(spec: ModelSpec) -> dict[str, Any]:
    """Translate a model.

    Raises:
        EngineError: When the model needs what Megatron-core does not compute, or its layers cannot share one configuration.
    """
    if obstacles := training_obstacles(spec):
        raise EngineError(
            f"{spec.family}: Megatron training does not support {'; '.join(obstacles)}; train a model without"
        )
    moe = experts_of(spec)
    dense = _only(spec, {x.mlp.intermediate_size for x in spec.layers if isinstance(x.mlp, GatedMlp)}, "MLP")
    return {
        "num_layers": len(spec.layers),
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": dense or (moe.intermediate_size if moe else None),
        "add_bias_linear": moe is not None and moe.storage is ExpertStorage.STACKED,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_epsilon,
        "gated_linear_unit": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **_attention_fields(spec),
        **_activation_fields(moe),
        **(_expert_fields(spec, moe) if moe else {}),
    }


def experts_of(spec: ModelSpec) -> MoeMlp | None:
    """Return the experts of the first layer that has some."""
    _only(spec, {_moe_shape(x.mlp) for x in spec.layers if isinstance(x.mlp, MoeMlp)}, "experts")
    return next((layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeMlp)), None)


def latent_norm_epsilon(spec: ModelSpec) -> float | None:
    """Return the epsilon of the norms inside latent attention, None without."""
    attention = spec.layers[0].attention
    return attention.norm_epsilon if isinstance(attention, MlaAttention) else None


def _attention_fields(spec: ModelSpec) -> dict[str, object]:
    shape = _only(spec, {_attention_shape(layer.attention) for layer in spec.layers}, "attention")
    assert shape is not None
    attention = spec.layers[0].attention
    if isinstance(attention, MlaAttention):
        return {
            "multi_latent_attention": True,
            "num_attention_heads": attention.num_heads,
            "q_lora_rank": attention.q_lora_rank,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_head_dim": attention.qk_nope_head_dim,
            "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
            "v_head_dim": attention.v_head_dim,
            "qk_layernorm": True,
            **latent_rope_fields(spec.rope),
        }
    return {
        "num_attention_heads": attention.num_heads,
        "num_query_groups": attention.num_kv_heads,
        "kv_channels": attention.head_dim,
        "add_qkv_bias": attention.has_qkv_bias,
        "qk_layernorm": attention.has_qk_norm,
        "softmax_type": "learnable" if attention.has_sinks else "vanilla",
        **_window_fields(spec),
        **(yarn_fields(spec.rope.scaling) if isinstance(spec.rope.scaling, YarnScaling) else {}),
    }


def _window_fields(spec: ModelSpec) -> dict[str, object]:
    windows = [layer.attention.window for layer in spec.layers if isinstance(layer.attention, GqaAttention)]
    window = _only(spec, {size for size in windows if size is not None}, "window")
    if window is None:
        return {}
    # Megatron counts the tokens before the query.
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": [int(size is not None) for size in windows]}


def _activation_fields(moe: MoeMlp | None) -> dict[str, object]:
    if moe is None or moe.activation is ExpertActivation.SWIGLU:
        return {"activation_func": F.silu}
    return {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": moe.activation_limit,
        "glu_linear_offset": 1.0,
    }


def _expert_fields(spec: ModelSpec, moe: MoeMlp) -> dict[str, object]:
    is_softmax = moe.scoring is RouterScoring.SOFTMAX
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.intermediate_size,
        "moe_layer_freq": [int(isinstance(layer.mlp, MoeMlp)) for layer in spec.layers],
        "moe_shared_expert_intermediate_size": moe.shared.intermediate_size if moe.shared else None,
        "moe_shared_expert_gate": moe.shared_gate is not None,
        "moe_router_topk": moe.num_experts_per_token,
        "moe_router_score_function": "softmax" if is_softmax else "sigmoid",
        # A softmax over the chosen logits equals the chosen probabilities rescaled to sum to one.
        "moe_router_pre_softmax": is_softmax and not moe.is_topk_normalized,
        "moe_router_num_groups": moe.num_groups if moe.num_groups > 1 else None,
        "moe_router_group_topk": moe.num_groups_per_token if moe.num_groups > 1 else None,
        "moe_router_topk_scaling_factor": moe.routed_scaling if moe.routed_scaling != 1.0 else None,
        "moe_router_enable_expert_bias": moe.correction_bias is not None,
        # Balance is the business of expert_balance.py.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }


def _attention_shape(attention: GqaAttention | MlaAttention) -> tuple[object, ...]:
    """Return what must agree in all layers; windows need not."""
    if isinstance(attention, MlaAttention):
        return (
            attention.num_heads,
            attention.q_lora_rank,
            attention.kv_lora_rank,
            attention.qk_nope_head_dim,
            attention.qk_rope_head_dim,
            attention.v_head_dim,
            attention.norm_epsilon,
        )
    return (
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        attention.has_qkv_bias,
        attention.has_qk_norm,
        attention.has_output_bias,
        attention.has_sinks,
    )


def _moe_shape(moe: MoeMlp) -> tuple[object, ...]:
    return (
        moe.intermediate_size,
        moe.num_experts,
        moe.num_experts_per_token,
        moe.is_topk_normalized,
        moe.shared.intermediate_size if moe.shared else 0,
        moe.scoring,
        moe.num_groups,
        moe.num_groups_per_token,
        moe.routed_scaling,
        moe.activation_limit,
    )


def _only(spec: ModelSpec, found: set[T], what: str) -> T | None:
    if len(found) > 1:
        raise EngineError(
            f"{spec.family}: layers differ in their {what} {sorted(map(str, found))}, expected the same in all"
        )
    return next(iter(found), None)
