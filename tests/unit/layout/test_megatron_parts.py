"""The harder parts of Megatron shard maps against shards made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from hybridrl.errors import LayoutError
from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import ExpertContainer, LayerSpec, MegatronLayout, PipelineLayout, megatron_shard_map
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import Place
from tests.unit.layout.models import FAMILIES, MTP_FAMILIES, fill_local, random_canonical

TE = LayerSpec.TRANSFORMER_ENGINE


def declare(spec, sizes, rank, **options):
    layout = MegatronLayout(spec, sizes, options.pop("dtype", DType.FLOAT32), **options)
    return megatron_shard_map(layout, Place("actor", rank, "node", f"cpu:{rank}"))


def local_and_canonical(family, sizes, rank, **options):
    spec = model_spec(FAMILIES[family])
    canonical = random_canonical(spec)
    return fill_local(declare(spec, sizes, rank, **options), canonical), canonical


def test_local_spec_cuts_mla_down_projections_and_te_keeps_them_whole():
    name, prefix = "0.decoder.layers.0.self_attention", "model.layers.0.self_attn"
    local, canonical = local_and_canonical("deepseek_v3", ParallelSizes(tp=2), 1)
    assert np.array_equal(local[f"{name}.linear_q_down_proj.weight"], canonical[f"{prefix}.q_a_proj.weight"][6:])
    kv_a = canonical[f"{prefix}.kv_a_proj_with_mqa.weight"]
    assert np.array_equal(local[f"{name}.linear_kv_down_proj.weight"], kv_a[6:])
    assert np.array_equal(local[f"{name}.q_layernorm.weight"], canonical[f"{prefix}.q_a_layernorm.weight"])
    assert np.array_equal(local[f"{name}.kv_layernorm.weight"], canonical[f"{prefix}.kv_a_layernorm.weight"])
    local, canonical = local_and_canonical("deepseek_v3", ParallelSizes(tp=2), 1, layer_spec=TE)
    assert np.array_equal(local[f"{name}.linear_kv_down_proj.weight"], kv_a)
    norm = canonical[f"{prefix}.kv_a_layernorm.weight"]
    assert np.array_equal(local[f"{name}.linear_kv_up_proj.layer_norm_weight"], norm)
    assert "0.decoder.layers.0.input_layernorm.weight" in local


def test_mla_up_projections_are_cut_by_head():
    name, prefix = "0.decoder.layers.1.self_attention", "model.layers.1.self_attn"
    local, canonical = local_and_canonical("deepseek_v3", ParallelSizes(tp=2), 1)
    q, kv = (canonical[f"{prefix}.{part}_b_proj.weight"] for part in ("q", "kv"))
    assert np.array_equal(local[f"{name}.linear_q_up_proj.weight"], q.reshape(4, 12, 12)[2:].reshape(24, 12))
    assert np.array_equal(local[f"{name}.linear_kv_up_proj.weight"], kv.reshape(4, 14, 8)[2:].reshape(28, 8))
    o = canonical[f"{prefix}.o_proj.weight"]
    assert np.array_equal(local[f"{name}.linear_proj.weight"], o.reshape(32, 4, 6)[:, 2:].reshape(32, 12))


def test_mla_without_q_lora_has_one_query_projection():
    local, canonical = local_and_canonical("moonlight", ParallelSizes(tp=2), 0)
    name = "0.decoder.layers.0.self_attention"
    q = canonical["model.layers.0.self_attn.q_proj.weight"]
    assert np.array_equal(local[f"{name}.linear_q_proj.weight"], q[:24])
    assert f"{name}.linear_q_up_proj.weight" not in local


def test_fused_mla_down_projection_has_this_ranks_rows_of_both():
    options = {"layer_spec": TE, "is_mla_down_fused": True}
    local, canonical = local_and_canonical("deepseek_v3", ParallelSizes(tp=2), 1, **options)
    q, kv = (canonical[f"model.layers.0.self_attn.{part}.weight"] for part in ("q_a_proj", "kv_a_proj_with_mqa"))
    name = "0.decoder.layers.0.self_attention.linear_qkv_down_proj"
    assert np.array_equal(local[f"{name}.weight"], np.concatenate([q[6:], kv[6:]]))
    assert f"{name}.layer_norm_weight" in local and "0.decoder.layers.0.input_layernorm.weight" not in local


def test_expert_bias_is_float32_in_a_bfloat16_model():
    spec = model_spec(FAMILIES["deepseek_v3"])
    tensors = declare(spec, ParallelSizes(), 0, dtype=DType.BFLOAT16).tensors
    assert tensors["0.decoder.layers.1.mlp.router.expert_bias"].dtype is DType.FLOAT32
    assert tensors["0.decoder.layers.1.mlp.router.weight"].dtype is DType.BFLOAT16
    tensors = declare(spec, ParallelSizes(), 0, dtype=DType.BFLOAT16, router_dtype=DType.FLOAT32).tensors
    assert tensors["0.decoder.layers.1.mlp.router.weight"].dtype is DType.FLOAT32


def test_shared_experts_are_cut_by_tp_and_routed_ones_by_etp():
    local, canonical = local_and_canonical("qwen2_moe", ParallelSizes(tp=2, ep=2), 1)
    gate, up = (canonical[f"model.layers.1.mlp.shared_expert.{part}_proj.weight"] for part in ("gate", "up"))
    name = "0.decoder.layers.1.mlp"
    shared = local[f"{name}.shared_experts.linear_fc1.weight"]
    assert np.array_equal(shared, np.concatenate([gate[20:], up[20:]]))
    gate, up = (canonical[f"model.layers.1.mlp.experts.4.{part}_proj.weight"] for part in ("gate", "up"))
    assert np.array_equal(local[f"{name}.experts.local_experts.0.linear_fc1.weight"], np.concatenate([gate, up]))
    gate = canonical["model.layers.1.mlp.shared_expert_gate.weight"]
    assert np.array_equal(local[f"{name}.shared_experts.gate_weight"], gate)


def test_experts_cut_by_etp_keep_gate_above_up_on_each_rank():
    local, canonical = local_and_canonical("qwen3_moe", ParallelSizes(tp=2, etp=2), 1, layer_spec=TE)
    gate, up = (canonical[f"model.layers.0.mlp.experts.3.{part}_proj.weight"] for part in ("gate", "up"))
    fc1 = local["0.decoder.layers.0.mlp.experts.linear_fc1.weight3"]
    assert np.array_equal(fc1, np.concatenate([gate[12:], up[12:]]))


def test_mixtral_w1_is_gate_and_w3_is_up():
    local, canonical = local_and_canonical("mixtral", ParallelSizes(), 0)
    w1, w2, w3 = (canonical[f"model.layers.0.block_sparse_moe.experts.5.w{k}.weight"] for k in (1, 2, 3))
    name = "0.decoder.layers.0.mlp.experts.local_experts.5"
    assert np.array_equal(local[f"{name}.linear_fc1.weight"], np.concatenate([w1, w3]))
    assert np.array_equal(local[f"{name}.linear_fc2.weight"], w2)


def test_gpt_oss_experts_are_transposed_and_gate_leaves_up():
    local, canonical = local_and_canonical("gpt_oss", ParallelSizes(tp=2, etp=2), 1, layer_spec=TE)
    prefix, name = "model.layers.0.mlp.experts", "0.decoder.layers.0.mlp.experts"
    stored = canonical[f"{prefix}.gate_up_proj"].reshape(8, 32, 96)
    gate, up = stored[3, :, 0::2].T, stored[3, :, 1::2].T
    assert np.array_equal(local[f"{name}.linear_fc1.weight3"], np.concatenate([gate[24:], up[24:]]))
    bias = canonical[f"{prefix}.gate_up_proj_bias"].reshape(8, 96)[3]
    assert np.array_equal(local[f"{name}.linear_fc1.bias3"], np.concatenate([bias[0::2][24:], bias[1::2][24:]]))
    down = canonical[f"{prefix}.down_proj"][3]
    assert np.array_equal(local[f"{name}.linear_fc2.weight3"], down[24:].T)
    assert np.array_equal(local[f"{name}.linear_fc2.bias3"], canonical[f"{prefix}.down_proj_bias"][3])


def test_gpt_oss_interleaved_by_one_keeps_the_order_of_the_checkpoint():
    local, canonical = local_and_canonical("gpt_oss", ParallelSizes(), 0, layer_spec=TE, glu_interleave_size=1)
    stored = canonical["model.layers.0.mlp.experts.gate_up_proj"].reshape(8, 32, 96)
    assert np.array_equal(local["0.decoder.layers.0.mlp.experts.linear_fc1.weight3"], stored[3].T)


@pytest.mark.parametrize("size", [1, 4, 24])
def test_interleaved_gate_and_up_come_apart_as_megatron_takes_them(size):
    local, canonical = local_and_canonical("qwen3_moe", ParallelSizes(), 0, layer_spec=TE, glu_interleave_size=size)
    fc1 = local["0.decoder.layers.0.mlp.experts.linear_fc1.weight2"]
    apart = fc1.reshape(24 // size, 2, size, 32).swapaxes(0, 1).reshape(48, 32)
    gate, up = (canonical[f"model.layers.0.mlp.experts.2.{part}_proj.weight"] for part in ("gate", "up"))
    assert np.array_equal(apart, np.concatenate([gate, up]))


def test_sinks_and_output_bias_of_gpt_oss():
    local, canonical = local_and_canonical("gpt_oss", ParallelSizes(tp=2), 1)
    name, prefix = "0.decoder.layers.2.self_attention", "model.layers.2.self_attn"
    assert np.array_equal(local[f"{name}.core_attention.softmax_offset"], canonical[f"{prefix}.sinks"][2:])
    assert np.array_equal(local[f"{name}.linear_proj.bias"], canonical[f"{prefix}.o_proj.bias"])
    assert np.array_equal(local["0.decoder.layers.2.mlp.router.bias"], canonical["model.layers.2.mlp.router.bias"])
    q, k, v = (canonical[f"{prefix}.{part}_proj.bias"] for part in "qkv")
    assert np.array_equal(local[f"{name}.linear_qkv.bias"], np.concatenate([q[16:], k[8:], v[8:]]))


def test_output_gates_follow_the_queries_of_their_group():
    spec = model_spec(FAMILIES["qwen3"])
    gated = [replace(x, attention=replace(x.attention, has_output_gate=True)) for x in spec.layers]
    spec = replace(spec, layers=tuple(gated))
    canonical = random_canonical(spec)
    q = canonical["model.layers.0.self_attn.q_proj.weight"].reshape(4, 2, 8, 32)
    k, v = (canonical[f"model.layers.0.self_attn.{part}_proj.weight"].reshape(2, 8, 32) for part in "kv")
    groups = [[q[2 * g, 0], q[2 * g + 1, 0], q[2 * g, 1], q[2 * g + 1, 1], k[g], v[g]] for g in range(2)]
    fused = np.concatenate([part for group in groups for part in group])
    for rank in range(4):
        local = fill_local(declare(spec, ParallelSizes(tp=4), rank), canonical)
        qkv = local["0.decoder.layers.0.self_attention.linear_qkv.weight"]
        assert np.array_equal(qkv, fused[24 * rank : 24 * (rank + 1)])


def test_single_grouped_weight_has_an_expert_dimension():
    options = {"layer_spec": TE, "experts": ExpertContainer.SINGLE_GROUPED}
    local, canonical = local_and_canonical("qwen3_moe", ParallelSizes(dp=2, ep=2), 1, **options)
    fc1 = local["0.decoder.layers.0.mlp.experts.linear_fc1.weight"]
    fc2 = local["0.decoder.layers.0.mlp.experts.linear_fc2.weight"]
    assert fc1.shape == (4, 48, 32) and fc2.shape == (4, 32, 24)
    gate, up, down = (canonical[f"model.layers.0.mlp.experts.6.{part}_proj.weight"] for part in ("gate", "up", "down"))
    assert np.array_equal(fc1[2], np.concatenate([gate, up])) and np.array_equal(fc2[2], down)


def test_virtual_stages_number_chunks_and_their_layers_from_zero():
    pipeline = PipelineLayout(virtual_size=2)
    local, canonical = local_and_canonical("qwen3", ParallelSizes(pp=2), 1, pipeline=pipeline)
    norm = canonical["model.layers.3.self_attn.q_norm.weight"]
    assert np.array_equal(local["1.decoder.layers.0.self_attention.q_layernorm.weight"], norm)
    assert "1.output_layer.weight" in local and "0.output_layer.weight" not in local


def test_prediction_layers_bring_an_embedding_to_their_stage():
    spec = model_spec(MTP_FAMILIES["deepseek_v3"], has_mtp=True)
    local = fill_local(declare(spec, ParallelSizes(tp=2, pp=2), 3), random_canonical(spec))
    canonical = random_canonical(spec)
    assert "0.embedding.word_embeddings.weight" in local
    eh = canonical["model.layers.4.eh_proj.weight"]
    assert np.array_equal(local["0.mtp.layers.0.eh_proj.weight"], eh[16:])
    assert "0.mtp.layers.0.transformer_layer.self_attention.linear_q_up_proj.weight" in local
    newer = declare(spec, ParallelSizes(), 0, mtp_inner_name="mtp_model_layer").tensors
    assert "0.mtp.layers.0.mtp_model_layer.mlp.router.expert_bias" in newer


def test_what_does_not_divide_is_named():
    with pytest.raises(
        LayoutError, match=r"layers.0.self_attention.linear_kv_down_proj.weight: 12 does not divide by tp_size 8"
    ):
        local_and_canonical("moonlight", ParallelSizes(tp=8), 0)
    with pytest.raises(LayoutError, match=r"linear_fc1.weight0: 24 gate rows do not divide by glu_interleave_size 5"):
        local_and_canonical("qwen3_moe", ParallelSizes(), 0, layer_spec=TE, glu_interleave_size=5)
    with pytest.raises(LayoutError, match=r"mlp.experts rows: 24 does not divide by etp_size 5"):
        local_and_canonical("qwen3_moe", ParallelSizes(dp=5, etp=5), 0)
