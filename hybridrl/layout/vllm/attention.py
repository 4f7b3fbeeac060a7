"""Attention weights of a vLLM worker.

Worked example: 4 query heads, 2 KV heads, head size 8, tp 4. Worker 2 holds q2 and, since KV heads are fewer than workers, a
copy of KV head 1, which worker 3 holds too: ``qkv_proj`` rows are q_proj 16..23, k_proj 8..15, v_proj 8..15.

Source: vllm 0.32 ``model_executor/layers/linear.py`` (QKVParallelLinear), ``models/deepseek_v2.py`` (fused_qkv_a_proj),
``models/gpt_oss.py`` (sinks).
"""

from __future__ import annotations

from hybridrl.layout.model import GqaAttention, MlaAttention
from hybridrl.layout.vllm.slices import WorkerSlices


def place_attention(out: WorkerSlices, attention: GqaAttention | MlaAttention) -> None:
    """Declare the attention of a layer."""
    if isinstance(attention, MlaAttention):
        _place_mla(out, attention)
    else:
        _place_gqa(out, attention)


def _place_gqa(out: WorkerSlices, attention: GqaAttention) -> None:
    prefix, dim = attention.prefix, attention.head_dim
    heads = out.share(attention.num_heads, f"{prefix} query heads")
    kv_heads = _kv_heads(out, attention)
    if attention.has_sinks:
        out.rows(f"{prefix}.sinks")
    queries, kv_rows = _rows(heads, attention.query_rows_per_head), _rows(kv_heads, dim)
    for suffix in ("bias", "weight") if attention.has_qkv_bias else ("weight",):
        parts = [
            (f"{prefix}.{part}_proj.{suffix}", rows)
            for part, rows in zip("qkv", (queries, kv_rows, kv_rows), strict=True)
        ]
        out.stacked_rows(out.layout.local_name(f"{prefix}.qkv_proj.{suffix}"), parts)
    if attention.has_output_bias:
        out.whole(f"{prefix}.o_proj.bias")
    out.columns(f"{prefix}.o_proj.weight", _rows(heads, dim))
    if attention.has_qk_norm:
        for part in "qk":
            out.whole(f"{prefix}.{part}_norm.weight")


def _rows(heads: range, per_head: int) -> range:
    return range(heads.start * per_head, heads.stop * per_head)


def _kv_heads(out: WorkerSlices, attention: GqaAttention) -> range:
    tp = out.layout.tp
    if tp > attention.num_kv_heads and tp % attention.num_kv_heads == 0:
        head = out.tp_rank * attention.num_kv_heads // tp
        return range(head, head + 1)
    return out.share(attention.num_kv_heads, f"{attention.prefix} KV heads")


def _place_mla(out: WorkerSlices, attention: MlaAttention) -> None:
    prefix = attention.prefix
    heads = out.share(attention.num_heads, f"{prefix} heads")
    q_a, kv_a = f"{prefix}.q_a_proj.weight", f"{prefix}.kv_a_proj_with_mqa.weight"
    is_fused = out.layout.has_mla and attention.q_lora_rank is not None
    if is_fused:
        assert attention.q_lora_rank is not None
        parts = [(q_a, range(attention.q_lora_rank)), (kv_a, range(attention.compressed_kv_rows))]
        out.stacked_rows(out.layout.local_name(f"{prefix}.fused_qkv_a_proj.weight"), parts)
    elif attention.q_lora_rank is not None:
        out.whole(q_a)
    elif out.layout.has_mla:
        out.whole(kv_a)
    if attention.q_lora_rank is not None:
        out.whole(f"{prefix}.q_a_layernorm.weight")
    out.rows(attention.query)
    if not out.layout.has_mla:
        out.whole(kv_a)
    out.whole(f"{prefix}.kv_a_layernorm.weight")
    out.rows(f"{prefix}.kv_b_proj.weight")
    out.columns(f"{prefix}.o_proj.weight", _rows(heads, attention.v_head_dim))
