"""What a model needs beyond plain GQA attention and SwiGLU.

The layouts place the weights of every family; an engine may not compute all of them yet. It declares the features that it
supports and refuses the rest before anything is built.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from hybridrl.layout.mlp import ExpertActivation, ExpertStorage, RouterScoring
from hybridrl.layout.model import DecoderLayer, GatedMlp, GqaAttention, MlaAttention, ModelSpec, MoeMlp
from hybridrl.layout.rope import Rope, YarnScaling


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
TRAINABLE_FEATURES = frozenset(Feature) - {Feature.OUTPUT_GATE, Feature.MTP}


def features_of(spec: ModelSpec) -> frozenset[Feature]:
    """Return the features that a model needs."""
    return frozenset(_features(spec))


def describe(features: frozenset[Feature]) -> str:
    """Return features in words, in a fixed order."""
    return ", ".join(sorted(feature.value for feature in features))


def training_obstacles(spec: ModelSpec) -> tuple[str, ...]:
    """Return why the Megatron engine cannot compute a model, in words; empty when it can."""
    missing = features_of(spec) - TRAINABLE_FEATURES
    obstacles = [describe(missing)] if missing else []
    obstacles += sorted({words for layer in spec.layers for words in _layer_obstacles(layer, spec.rope)})
    has_bias = {_has_linear_bias(layer) for layer in spec.layers}
    if len(has_bias) > 1 or (True in has_bias and any(isinstance(x.mlp, GatedMlp) for x in spec.layers)):
        obstacles.append("biases in some linear layers only: o_proj has one and a dense MLP has none")
    return tuple(obstacles)


def _layer_obstacles(layer: DecoderLayer, rope: Rope) -> Iterator[str]:
    if isinstance(rope.scaling, YarnScaling):
        if rope.fraction != 1.0:
            yield "YaRN on a part of each head"
        if isinstance(layer.attention, MlaAttention) and not rope.scaling.is_truncated:
            yield "YaRN without rounded borders in latent attention"
    if isinstance(layer.attention, MlaAttention) and rope.fraction != 1.0:
        yield "a partial rotary embedding in latent attention"
    if isinstance(layer.mlp, MoeMlp):
        yield from _router_obstacles(layer.mlp)


def _router_obstacles(moe: MoeMlp) -> Iterator[str]:
    """Say what Megatron-core's router computes otherwise.

    It always rescales chosen sigmoid scores to sum to one unless one is chosen, takes one chosen softmax score as it is, and
    ranks a group by its best ``top-k // groups per token`` scores.
    """
    if moe.scoring is RouterScoring.SIGMOID and moe.is_topk_normalized != (moe.num_experts_per_token > 1):
        yield "sigmoid scores that are not rescaled, or rescaled with one expert per token"
    if moe.scoring is RouterScoring.SOFTMAX and moe.is_topk_normalized and moe.num_experts_per_token == 1:
        yield "rescaled scores with one expert per token"
    ranked_by = moe.num_experts_per_token // moe.num_groups_per_token
    if moe.num_groups > 1 and ranked_by != moe.num_scores_per_group:
        yield f"expert groups ranked by {moe.num_scores_per_group} scores, where Megatron-core ranks by {ranked_by}"
    if (moe.storage is ExpertStorage.STACKED) != (moe.activation is ExpertActivation.CLAMPED_SWIGLU):
        yield "expert biases without a clamped SwiGLU, or the reverse"


def _has_linear_bias(layer: DecoderLayer) -> bool:
    """Whether Megatron-core's layer needs biases in all its linear layers."""
    has_output_bias = isinstance(layer.attention, GqaAttention) and layer.attention.has_output_bias
    has_expert_bias = isinstance(layer.mlp, MoeMlp) and layer.mlp.storage is ExpertStorage.STACKED
    return has_output_bias or has_expert_bias


def _features(spec: ModelSpec) -> Iterator[Feature]:
    if spec.rope.scaling is not None:
        yield Feature.ROPE_SCALING
    if spec.rope.fraction != 1.0:
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
