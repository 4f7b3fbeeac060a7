"""The whole shard map of a Megatron rank, chunk by chunk.

Source: megatron-core 0.16.1 and 0.19.2, ``models/gpt/gpt_model.py``, ``models/gpt/gpt_layer_specs.py`` and
``transformer/multi_token_prediction.py``.
"""

from __future__ import annotations

from hybridrl.layout.builder import ShardMapBuilder
from hybridrl.layout.megatron.attention import place_attention
from hybridrl.layout.megatron.experts import place_experts
from hybridrl.layout.megatron.layout import MegatronLayout
from hybridrl.layout.megatron.pipeline import ModelChunk
from hybridrl.layout.megatron.slices import RankSlices
from hybridrl.layout.model import DecoderLayer, MoeMlp, MtpLayer
from hybridrl.layout.shard import Place, ShardMap


def megatron_shard_map(layout: MegatronLayout, place: Place) -> ShardMap:
    """Declare the shard map of rank `place.rank`.

    Local names are ``{chunk}.{parameter}``, where chunk counts the rank's model chunks from 0.

    Raises:
        LayoutError: When a size does not divide; names the parameter and both numbers.
    """
    at = layout.sizes.coordinates(place.rank)
    builder = ShardMapBuilder(place, layout.spec.tensors())
    out = RankSlices(layout, at, builder)
    for index, chunk in enumerate(layout.chunks(at.pp)):
        _place_chunk(out, chunk, str(index))
    return builder.build()


def _place_chunk(out: RankSlices, chunk: ModelChunk, local: str) -> None:
    spec = out.layout.spec
    if chunk.has_embedding or chunk.has_mtp:
        out.vocab(spec.embedding, f"{local}.embedding.word_embeddings.weight")
    for local_index, index in enumerate(chunk.layers):
        _place_layer(out, spec.layers[index], f"{local}.decoder.layers.{local_index}")
    if _has_final_norm(out, chunk):
        out.whole(spec.final_norm, f"{local}.decoder.final_layernorm.weight")
    if chunk.has_mtp:
        for depth, mtp in enumerate(spec.mtp_layers):
            _place_mtp(out, mtp, f"{local}.mtp.layers.{depth}")
    if chunk.has_output and spec.value_head:
        out.whole(spec.value_head.weight, f"{local}.output_layer.weight")
        if spec.value_head.bias:
            out.whole(spec.value_head.bias, f"{local}.output_layer.bias")
    elif chunk.has_output and not (spec.is_tied and chunk.has_embedding):
        out.vocab(spec.embedding if spec.is_tied else spec.output, f"{local}.output_layer.weight")


def _has_final_norm(out: RankSlices, chunk: ModelChunk) -> bool:
    """With multi-token prediction the norm follows the last layer, which the output's stage may not have."""
    if out.layout.spec.mtp_layers:
        return len(out.layout.spec.layers) - 1 in chunk.layers
    return chunk.has_output


def _place_layer(out: RankSlices, layer: DecoderLayer, local: str) -> None:
    place_attention(out, layer.attention, layer.input_norm, local)
    is_fused = out.layout.is_te and not isinstance(layer.mlp, MoeMlp)
    norm = f"{local}.{'mlp.linear_fc1.layer_norm_weight' if is_fused else 'pre_mlp_layernorm.weight'}"
    out.whole(layer.post_attention_norm, norm)
    if isinstance(layer.mlp, MoeMlp):
        place_experts(out, layer.mlp, f"{local}.mlp")
    else:
        fc1, fc2 = (f"{local}.mlp.linear_{name}.weight" for name in ("fc1", "fc2"))
        out.gated(layer.mlp, fc1, fc2, out.tp, "tp_size")


def _place_mtp(out: RankSlices, mtp: MtpLayer, local: str) -> None:
    out.whole(mtp.embedding_norm, f"{local}.enorm.weight")
    out.whole(mtp.hidden_norm, f"{local}.hnorm.weight")
    out.rows(mtp.projection, f"{local}.eh_proj.weight")
    _place_layer(out, mtp.layer, f"{local}.{out.layout.mtp_inner_name}")
    out.whole(mtp.final_norm, f"{local}.final_layernorm.weight")
