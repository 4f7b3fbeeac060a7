"""The whole shard map of a vLLM worker, in the order of the model's modules.

Multi-token-prediction layers live in a drafter with a model of its own and are not part of this map.

Source: vllm 0.32 ``model_executor/models/{qwen2,qwen2_moe,qwen3,qwen3_moe,llama,mixtral,deepseek_v2,glm4_moe,gpt_oss}.py``,
``layers/vocab_parallel_embedding.py`` (vocabulary padded to 64, then cut).
"""

from __future__ import annotations

from hybridrl.layout.builder import ShardMapBuilder
from hybridrl.layout.model import DecoderLayer, MoeMlp
from hybridrl.layout.shard import Place, ShardMap
from hybridrl.layout.vllm.attention import place_attention
from hybridrl.layout.vllm.layout import VllmLayout
from hybridrl.layout.vllm.mlp import place_experts, place_gated
from hybridrl.layout.vllm.placement import layers_of_stage
from hybridrl.layout.vllm.slices import WorkerSlices

# Families whose model in vLLM builds embedding, final norm and output on every pipeline stage, used there or not.
_WHOLE_ON_EVERY_STAGE = frozenset({"qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss"})


def vllm_shard_map(layout: VllmLayout, tp_rank: int, place: Place, *, pp_rank: int = 0, dp_rank: int = 0) -> ShardMap:
    """Declare the shard map of one worker of a replica.

    Raises:
        LayoutError: When a size does not divide by the tensor-parallel degree; names the parameter.
    """
    spec = layout.spec
    builder = ShardMapBuilder(place, spec.tensors())
    out = WorkerSlices(layout, tp_rank, dp_rank, builder)
    has_both_ends = spec.family in _WHOLE_ON_EVERY_STAGE
    is_last = pp_rank == layout.pp - 1
    if pp_rank == 0 or has_both_ends or (is_last and spec.is_tied):
        out.vocab(spec.embedding)
    for index in layers_of_stage(len(spec.layers), layout.pp, pp_rank, layout.layer_partition):
        _place_layer(out, spec.layers[index])
    if is_last or has_both_ends:
        out.whole(spec.final_norm)
        if not spec.is_tied:
            out.vocab(spec.output)
    return builder.build()


def _place_layer(out: WorkerSlices, layer: DecoderLayer) -> None:
    place_attention(out, layer.attention)
    if isinstance(layer.mlp, MoeMlp):
        place_experts(out, layer.mlp, layer.index)
    else:
        place_gated(out, layer.mlp)
    out.whole(layer.input_norm)
    out.whole(layer.post_attention_norm)
