"""Bytes of activations: per token and layer, in flight on a pipeline stage, and of the loss on the last one.

Terms are those of Transformer Engine's layers with flash attention, which never stores scores. S is tp with sequence parallelism and 1
without, t is tp, w the bytes of an element; a rank holds T = micro_batch.tokens / cp tokens.

    residuals and norms    4 w h / S
    GQA                    w (heads + 2 kv_heads) d / t, and w heads d / t for the output
    MLA                    w (2 q_lora + 2 kv_lora + rope), and w heads (2 (nope + rope) + 2 v) / t
    dense MLP              3 w I / t
    routed experts         imbalance x k w (etp h + 3 I) / S, and 8 E / S for the router in float32

Worked example, Qwen3-30B-A3B at tp 1 in bfloat16: 16,384 + 10,240 + 8,192 + 69,632 + 1,024 = 105,472 bytes at imbalance 1.

Source: Korthikanti et al., arXiv 2205.05198, table 2, extended to experts; megatron-core 0.16.1, pipeline_parallel/schedules.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.choices import Recompute
from hybridrl.config.schema import ExperimentConfig, ParallelConfig
from hybridrl.layout.megatron import MegatronLayout
from hybridrl.layout.model import DecoderLayer, GqaAttention, MlaAttention, MoeMlp
from hybridrl.planning.parameters import StageParameters
from hybridrl.planning.workload import Workload

_FLOAT32 = 4
_ROUTER_BYTES = 8  # logits and probabilities, float32


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes per token of one layer, on one rank.

    Attributes:
        kept: Kept for the backward pass without recomputation.
        input: The layer's input alone, which full recomputation keeps.
    """

    kept: float
    input: float


def layer_activations(
    layer: DecoderLayer, layout: MegatronLayout, *, is_sequence_parallel: bool, imbalance: float
) -> LayerActivations:
    """Return the bytes per token of a layer.

    Args:
        imbalance: Tokens of the busiest expert-parallel rank over the average.
    """
    tp, width = layout.sizes.tp, layout.dtype.itemsize
    cut = tp if is_sequence_parallel else 1
    hidden = layout.spec.hidden_size
    kept = 4 * width * hidden / cut + width * _attention(layer.attention, tp)
    mlp = layer.mlp
    if isinstance(mlp, MoeMlp):
        routed = mlp.num_experts_per_token * (layout.sizes.etp * hidden + 3 * mlp.intermediate_size)
        kept += imbalance * width * routed / cut + _ROUTER_BYTES * mlp.num_experts / cut
        kept += 3 * width * mlp.shared.intermediate_size / tp if mlp.shared else 0
    else:
        kept += 3 * width * mlp.intermediate_size / tp
    return LayerActivations(kept, width * hidden / cut)


def _attention(attention: GqaAttention | MlaAttention, tp: int) -> float:
    """Return the elements per token that attention keeps."""
    if isinstance(attention, MlaAttention):
        latent = 2 * (attention.q_lora_rank or 0) + 2 * attention.kv_lora_rank + attention.qk_rope_head_dim
        per_head = 2 * attention.query_rows_per_head + 2 * attention.v_head_dim
        return latent + attention.num_heads * per_head / tp
    queries = attention.num_heads * (attention.query_rows_per_head + attention.head_dim)
    return (queries + 2 * attention.num_kv_heads * attention.head_dim) / tp


def chunks_in_flight(pp_rank: int, pp_size: int, vpp_size: int, num_micro_batches: int) -> int:
    """Return the forward passes of model chunks that a stage keeps at once.

    Example: stage 0 of 4 keeps 4 micro-batches with one chunk per rank, and 11 passes of half as many layers with two.
    """
    if vpp_size == 1:
        return min(num_micro_batches, pp_size - pp_rank)
    warm_up = 2 * (pp_size - pp_rank - 1) + (vpp_size - 1) * pp_size + 1
    return min(num_micro_batches * vpp_size, warm_up)


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes on a rank of one pipeline stage.

    Attributes:
        training: What the backward passes to come need, at most.
        forward: The working set of a pass without gradients: one layer.
        loss: Logits and what the log-probs make of them, when training; `scoring` without gradients.
    """

    training: int
    forward: int
    loss: int
    scoring: int


def stage_activations(
    config: ExperimentConfig, parallel: ParallelConfig, layout: MegatronLayout, stage: StageParameters, work: Workload
) -> StageActivations:
    """Return the activations of a stage at the largest micro-batch.

    Args:
        parallel: Of the role.
    """
    tokens = work.micro_batch_tokens / parallel.cp_size
    is_cut = parallel.sequence_parallel and parallel.tp_size > 1
    layers = [
        layer_activations(
            layout.spec.layers[index],
            layout,
            is_sequence_parallel=is_cut,
            imbalance=config.plan.expert_imbalance if parallel.ep_size > 1 else 1.0,
        )
        for chunk in stage.chunks
        for index in chunk.layers
    ]
    working_set = tokens * max((layer.kept for layer in layers), default=0.0)
    is_full = config.actor.recompute is Recompute.FULL
    per_pass = tokens * sum(layer.input if is_full else layer.kept for layer in layers) / len(stage.chunks)
    passes = chunks_in_flight(stage.pp_rank, parallel.pp_size, len(stage.chunks), work.num_micro_batches)
    has_logits = stage.has_output and layout.spec.value_head is None
    logits = tokens * layout.padded_vocab_size / parallel.tp_size if has_logits else 0
    has_entropy = config.algorithm.policy_loss.entropy_coef > 0
    width = layout.dtype.itemsize
    return StageActivations(
        training=int(passes * per_pass + (working_set if is_full else 0)),
        forward=int(working_set),
        loss=int(logits * loss_bytes_per_logit(width, has_entropy=has_entropy)),
        scoring=int(logits * loss_bytes_per_logit(width, has_entropy=False)),
    )


def loss_bytes_per_logit(width: int, *, has_entropy: bool) -> int:
    """Return the most bytes per logit that are alive at once, in ``engines/megatron/logprobs.py``.

    Forward: the logits, the rows that are picked, and in float32 the scaled logits, their exponentials and a product. Backward: two
    saved float32 tensors, the gradient in both types, and with an entropy term two more.

    Args:
        width: Bytes of a logit.
    """
    forward = 2 * width + 3 * _FLOAT32
    backward = 2 * _FLOAT32 + _FLOAT32 + width + (2 * _FLOAT32 if has_entropy else width)
    return max(forward, backward)
