"""Attention weights of a Megatron rank.

Worked example: fused QKV of 4 query heads, 2 KV groups, head size 8, tp 2. Global rows are q0 q1 k0 v0 q2 q3 k1 v1, 64
rows in all; tp rank 1 holds rows 32..63, so local rows 0..15 are q_proj rows 16..31, local rows 16..23 are k_proj rows
8..15 and local rows 24..31 are v_proj rows 8..15. With more ranks than groups the cut falls inside a group; the same
intersection of row ranges covers it. With an output gate a group is q0 q1 gate0 gate1 k v, and q_proj holds q0 gate0 q1 gate1.

Source: megatron-core 0.16.1 and 0.19.2, ``transformer/attention.py``, ``transformer/multi_latent_attention.py`` and
``models/gpt/gpt_layer_specs.py``: the local spec cuts MLA's down projections by rows, Transformer Engine's keeps them whole
on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.layout.box import DType
from hybridrl.layout.megatron.slices import RankSlices
from hybridrl.layout.model import GqaAttention, MlaAttention


def place_attention(out: RankSlices, attention: GqaAttention | MlaAttention, input_norm: str, layer: str) -> None:
    """Declare the attention of a layer and the norm before it; `layer` is e.g. ``0.decoder.layers.3``."""
    local = f"{layer}.self_attention"
    if isinstance(attention, MlaAttention):
        _place_mla(out, attention, input_norm, layer)
    else:
        norm = f"{local}.linear_qkv.layer_norm_weight" if out.layout.is_te else f"{layer}.input_layernorm.weight"
        out.whole(input_norm, norm)
        _place_gqa(out, attention, local)
    out.columns(f"{attention.prefix}.o_proj.weight", f"{local}.linear_proj.weight", out.tp)


def _place_gqa(out: RankSlices, attention: GqaAttention, local: str) -> None:
    blocks = list(qkv_blocks(attention))
    mine = out.tp.of(blocks[-1][2].stop, f"{local}.linear_qkv rows", "tp_size")
    for suffix in ("weight", "bias") if attention.has_qkv_bias else ("weight",):
        name = f"{local}.linear_qkv.{suffix}"
        tail = (attention.hidden_size,) if suffix == "weight" else ()
        out.out.local(name, (len(mine), *tail), out.layout.dtype)
        for part, first_row, block in blocks:
            cut = range(max(block.start, mine.start), min(block.stop, mine.stop))
            if cut:
                rows = range(first_row + cut.start - block.start, first_row + cut.stop - block.start)
                out.out.place_rows(f"{attention.prefix}.{part}_proj.{suffix}", rows, name, cut.start - mine.start)
    if attention.has_output_bias:
        out.whole(f"{attention.prefix}.o_proj.bias", f"{local}.linear_proj.bias")
    if attention.has_qk_norm:
        for part in "qk":
            out.whole(f"{attention.prefix}.{part}_norm.weight", f"{local}.{part}_layernorm.weight")
    if attention.has_sinks:
        # Transformer Engine makes the offset in float32 whatever the model's type.
        dtype = DType.FLOAT32 if out.layout.is_te else None
        out.rows(f"{attention.prefix}.sinks", f"{local}.core_attention.softmax_offset", dtype)


def qkv_blocks(attention: GqaAttention) -> Iterator[tuple[str, int, range]]:
    """Yield (part, first canonical row, global fused rows) of the interleaved QKV weight, group by group."""
    dim, per_head = attention.head_dim, attention.query_rows_per_head
    queries = attention.num_heads // attention.num_kv_heads
    row = 0
    for group in range(attention.num_kv_heads):
        heads = range(group * queries, (group + 1) * queries)
        if attention.has_output_gate:
            parts = [("q", head * per_head, dim) for head in heads]
            parts += [("q", head * per_head + dim, dim) for head in heads]
        else:
            parts = [("q", heads.start * dim, queries * dim)]
        for part, first, num_rows in (*parts, ("k", group * dim, dim), ("v", group * dim, dim)):
            yield part, first, range(row, row + num_rows)
            row += num_rows


def _place_mla(out: RankSlices, attention: MlaAttention, input_norm: str, layer: str) -> None:
    local, prefix = f"{layer}.self_attention", attention.prefix
    is_te = out.layout.is_te
    is_fused = out.layout.is_mla_down_fused and attention.q_lora_rank is not None
    fused_norm = f"{local}.linear_qkv_down_proj.layer_norm_weight"
    out.whole(input_norm, fused_norm if is_fused and is_te else f"{layer}.input_layernorm.weight")
    if is_fused:
        _place_fused_down(out, attention, f"{local}.linear_qkv_down_proj.weight")
    else:
        if attention.q_lora_rank is not None:
            _place_down(out, f"{prefix}.q_a_proj.weight", f"{local}.linear_q_down_proj.weight")
        _place_down(out, f"{prefix}.kv_a_proj_with_mqa.weight", f"{local}.linear_kv_down_proj.weight")
    if attention.q_lora_rank is None:
        out.rows(attention.query, f"{local}.linear_q_proj.weight")
    else:
        out.rows(attention.query, f"{local}.linear_q_up_proj.weight")
        norm = f"{local}.linear_q_up_proj.layer_norm_weight" if is_te else f"{local}.q_layernorm.weight"
        out.whole(f"{prefix}.q_a_layernorm.weight", norm)
    out.rows(f"{prefix}.kv_b_proj.weight", f"{local}.linear_kv_up_proj.weight")
    norm = f"{local}.linear_kv_up_proj.layer_norm_weight" if is_te else f"{local}.kv_layernorm.weight"
    out.whole(f"{prefix}.kv_a_layernorm.weight", norm)


def _place_down(out: RankSlices, tensor: str, local: str) -> None:
    if out.layout.is_te:
        out.whole(tensor, local)
    else:
        out.rows(tensor, local)


def _place_fused_down(out: RankSlices, attention: MlaAttention, local: str) -> None:
    """Declare the fused down projection: this rank's rows of q_a_proj, then its rows of kv_a_proj_with_mqa."""
    assert attention.q_lora_rank is not None
    parts = {"q_a_proj": attention.q_lora_rank, "kv_a_proj_with_mqa": attention.compressed_kv_rows}
    cuts = {part: out.tp.of(rows, f"{local} {part} rows", "tp_size") for part, rows in parts.items()}
    out.out.local(local, (sum(map(len, cuts.values())), attention.hidden_size), out.layout.dtype)
    row = 0
    for part, mine in cuts.items():
        out.out.place_rows(f"{attention.prefix}.{part}.weight", mine, local, row)
        row += len(mine)
