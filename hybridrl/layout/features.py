"""What a model needs beyond plain GQA attention and SwiGLU.

The layouts place the weights of every family; an engine may not compute all of them yet. It declares the features that it
supports and refuses the rest before anything is built.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from hybridrl.layout.mlp import ExpertActivation, ExpertStorage, RouterScoring
from hybridrl.layout.model import DecoderLayer, GqaAttention, MlaAttention, ModelSpec, MoeMlp


class Feature(enum.Enum):
    """A property of a model; the value says it in words."""

    QKV_BIAS = "biases of q_proj, k_proj and v_proj"
    QK_NORM = "norms of query and key heads"
    OUTPUT_BIAS = "a bias of o_proj"
    OUTPUT_GATE = "an attention output gate"
    SINKS = "attention sinks"
    SLIDING_WINDOW = "sliding-window attention"
    MLA = "multi-head latent attention"
    EXPERTS = "routed experts"
    SHARED_EXPERTS = "shared experts"
    SHARED_EXPERT_GATE = "a gate on the shared experts"
    ROUTER_BIAS = "a bias of the router"
    CORRECTION_BIAS = "a correction bias of the router's choice"
    SIGMOID_ROUTING = "sigmoid router scores"
    GROUPED_ROUTING = "routing within expert groups"
    ROUTED_SCALING = "a scale on the routed experts' output"
    EXPERT_BIAS = "stacked experts with biases"
    CLAMPED_SWIGLU = "a clamped SwiGLU"
    ROPE_SCALING = "a scaled rotary embedding"
    PARTIAL_ROTARY = "heads that rotate in part"
    MTP = "multi-token-prediction layers"


# What the Megatron engine computes. It lies here, and not with the engine, so that preflight can refuse the rest without torch.
TRAINABLE_FEATURES = frozenset({Feature.QKV_BIAS, Feature.QK_NORM, Feature.EXPERTS})


def features_of(spec: ModelSpec) -> frozenset[Feature]:
    """Return the features that a model needs."""
    return frozenset(_features(spec))


def describe(features: frozenset[Feature]) -> str:
    """Return features in words, in a fixed order."""
    return ", ".join(sorted(feature.value for feature in features))


def _features(spec: ModelSpec) -> Iterator[Feature]:
    if spec.rope_scaling is not None:
        yield Feature.ROPE_SCALING
    if spec.rotary_fraction != 1.0:
        yield Feature.PARTIAL_ROTARY
    if spec.mtp_layers:
        yield Feature.MTP
    for layer in (*spec.layers, *(mtp.layer for mtp in spec.mtp_layers)):
        yield from _layer_features(layer)


def _layer_features(layer: DecoderLayer) -> Iterator[Feature]:
    if isinstance(layer.attention, MlaAttention):
        yield Feature.MLA
    else:
        yield from _attention_features(layer.attention)
    if isinstance(layer.mlp, MoeMlp):
        yield Feature.EXPERTS
        yield from _expert_features(layer.mlp)


def _attention_features(attention: GqaAttention) -> Iterator[Feature]:
    flags = {
        Feature.QKV_BIAS: attention.has_qkv_bias,
        Feature.QK_NORM: attention.has_qk_norm,
        Feature.OUTPUT_BIAS: attention.has_output_bias,
        Feature.OUTPUT_GATE: attention.has_output_gate,
        Feature.SINKS: attention.has_sinks,
        Feature.SLIDING_WINDOW: attention.window is not None,
    }
    yield from (feature for feature, is_needed in flags.items() if is_needed)


def _expert_features(moe: MoeMlp) -> Iterator[Feature]:
    flags = {
        Feature.SHARED_EXPERTS: moe.shared is not None,
        Feature.SHARED_EXPERT_GATE: moe.shared_gate is not None,
        Feature.ROUTER_BIAS: moe.router_bias is not None,
        Feature.CORRECTION_BIAS: moe.correction_bias is not None,
        Feature.SIGMOID_ROUTING: moe.scoring is RouterScoring.SIGMOID,
        Feature.GROUPED_ROUTING: moe.num_groups > 1,
        Feature.ROUTED_SCALING: moe.routed_scaling != 1.0,
        Feature.EXPERT_BIAS: moe.storage is ExpertStorage.STACKED,
        Feature.CLAMPED_SWIGLU: moe.activation is ExpertActivation.CLAMPED_SWIGLU,
    }
    yield from (feature for feature, is_needed in flags.items() if is_needed)
