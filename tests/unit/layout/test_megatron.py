"""Megatron shard maps against hand-made reference shards of real values."""

import numpy as np
import pytest

from hybridrl.errors import LayoutError
from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import LayerSpec, MegatronLayout, megatron_shard_map
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import Place
from tests.unit.layout.models import QWEN3_DENSE, QWEN3_MOE, fill_local, random_canonical

SIZES = [
    ParallelSizes(),
    ParallelSizes(tp=2, pp=2, ep=2),
    ParallelSizes(tp=2, ep=2, etp=2, dp=2),
    ParallelSizes(tp=4, pp=2),
    ParallelSizes(dp=4, ep=4),
]


def _local(config, sizes, rank, **options):
    layout = MegatronLayout(model_spec(config), sizes, DType.FLOAT32, **options)
    shard_map = megatron_shard_map(layout, Place("actor", rank, "node", f"cpu:{rank}"))
    return fill_local(shard_map, random_canonical(layout.spec)), random_canonical(layout.spec)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("config", [QWEN3_DENSE, QWEN3_MOE], ids=["dense", "moe"])
def test_every_local_element_is_covered(config, sizes):
    for rank in range(sizes.world_size):
        local, _ = _local(
            config, sizes if "num_experts" in config else ParallelSizes(tp=sizes.tp, pp=sizes.pp, dp=sizes.dp), rank
        )
        assert all(np.isfinite(values).all() for values in local.values())


def test_fused_qkv_interleaves_groups():
    local, canonical = _local(QWEN3_DENSE, ParallelSizes(tp=2), 1)
    q, k, v = (canonical[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    expected = np.concatenate([q[16:32], k[8:16], v[8:16]])
    assert np.array_equal(local["0.decoder.layers.0.self_attention.linear_qkv.weight"], expected)


def test_more_tensor_ranks_than_groups_cut_inside_a_group():
    canonical = random_canonical(model_spec(QWEN3_DENSE))
    q, k, v = (canonical[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    fused = np.concatenate([q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]])
    for rank in range(4):
        local, _ = _local(QWEN3_DENSE, ParallelSizes(tp=4), rank)
        name = "0.decoder.layers.0.self_attention.linear_qkv.weight"
        assert np.array_equal(local[name], fused[16 * rank : 16 * (rank + 1)])


def test_gate_and_up_are_cut_per_rank():
    local, canonical = _local(QWEN3_DENSE, ParallelSizes(tp=2), 1)
    gate, up = (canonical[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    half = gate.shape[0] // 2
    assert np.array_equal(local["0.decoder.layers.0.mlp.linear_fc1.weight"], np.concatenate([gate[half:], up[half:]]))


def test_experts_are_global_under_expert_parallelism():
    local, canonical = _local(QWEN3_MOE, ParallelSizes(tp=2, ep=2), 1)
    down = canonical["model.layers.1.mlp.experts.5.down_proj.weight"]
    assert np.array_equal(local["0.decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"], down)


def test_transformer_engine_names_grouped_experts_and_fused_norms():
    local, _ = _local(QWEN3_MOE, ParallelSizes(ep=2, dp=2), 0, layer_spec=LayerSpec.TRANSFORMER_ENGINE)
    assert "0.decoder.layers.0.mlp.experts.linear_fc1.weight3" in local
    assert "0.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in local
    assert "0.decoder.layers.0.pre_mlp_layernorm.weight" in local


def test_pipeline_stages_number_layers_from_zero():
    local, canonical = _local(QWEN3_MOE, ParallelSizes(pp=2), 1)
    expected = canonical["model.layers.1.self_attn.q_norm.weight"]
    assert np.array_equal(local["0.decoder.layers.0.self_attention.q_layernorm.weight"], expected)
    assert "0.embedding.word_embeddings.weight" not in local


def test_tied_embeddings_live_on_both_end_stages():
    tied = QWEN3_DENSE | {"tie_word_embeddings": True}
    local, canonical = _local(tied, ParallelSizes(pp=2), 1)
    assert np.array_equal(local["0.output_layer.weight"], canonical["model.embed_tokens.weight"])
    local, _ = _local(tied, ParallelSizes(), 0)
    assert "0.output_layer.weight" not in local


def test_vocabulary_padding_belongs_to_no_canonical_element():
    layout = MegatronLayout(model_spec(QWEN3_DENSE), ParallelSizes(tp=2), DType.FLOAT32, vocab_divisor=64)
    shard_map = megatron_shard_map(layout, Place("actor", 1, "node", "cpu:1"))
    name = "0.embedding.word_embeddings.weight"
    assert shard_map.tensors[name].shape == (64, 32)
    assert shard_map.padding[name] == 28 * 32


def test_degree_that_does_not_divide_is_named():
    with pytest.raises(LayoutError, match=r"experts: 8 does not divide by ep_size 3"):
        _local(QWEN3_MOE, ParallelSizes(ep=3, dp=3), 0)
    with pytest.raises(LayoutError, match=r"2 layers do not divide into pp_size 4"):
        _local(QWEN3_DENSE, ParallelSizes(pp=4), 3)
