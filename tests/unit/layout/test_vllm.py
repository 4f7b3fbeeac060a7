"""Declared vLLM shard maps: coverage for every family, and shards made by hand."""

import numpy as np
import pytest

from hybridrl.errors import LayoutError
from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.shard import Place
from hybridrl.layout.vllm import ExpertPlacement, VllmLayout, vllm_shard_map
from hybridrl.layout.vllm.placement import layers_of_stage, linear_experts, placed_experts
from tests.unit.layout.models import FAMILIES, fill_local, held_by_all, random_canonical

LAYOUTS = {
    "tp1": {"tp": 1},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "tp2-ep": {"tp": 2, "has_expert_parallel": True},
    "tp2-dp2-ep": {"tp": 2, "dp": 2, "has_expert_parallel": True},
    "tp2-dp2": {"tp": 2, "dp": 2},
    "round-robin": {"tp": 2, "dp": 2, "has_expert_parallel": True, "placement": ExpertPlacement.ROUND_ROBIN},
    "pp2": {"tp": 1, "pp": 2},
    "pp3-tp2": {"tp": 2, "pp": 3},
    "partition": {"tp": 1, "pp": 2, "layer_partition": (1, 3)},
    "no-mla": {"tp": 2, "has_mla": False},
    "sequence-parallel": {"tp": 2, "dp": 2, "has_expert_parallel": True, "has_sequence_parallel_moe": True},
}


def declare(spec, tp_rank=0, pp_rank=0, dp_rank=0, dtype=DType.FLOAT32, **options):
    layout = VllmLayout(spec, dtype=dtype, **options)
    rank = (dp_rank * layout.pp + pp_rank) * layout.tp + tp_rank
    place = Place("rollout", rank, "node", f"cpu:{rank}")
    return vllm_shard_map(layout, tp_rank, place, pp_rank=pp_rank, dp_rank=dp_rank)


def local_and_canonical(family, **options):
    spec = model_spec(FAMILIES[family])
    canonical = random_canonical(spec)
    return fill_local(declare(spec, **options), canonical), canonical


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_workers_hold_each_element_once_and_the_whole_checkpoint_together(family, layout):
    spec, options = model_spec(FAMILIES[family]), LAYOUTS[layout]
    maps = [
        declare(spec, tp_rank, pp_rank, dp_rank, **options)
        for tp_rank in range(options["tp"])
        for pp_rank in range(options.get("pp", 1))
        for dp_rank in range(options.get("dp", 1))
    ]
    for shard_map in maps:
        fill_local(shard_map, random_canonical(spec))
    assert held_by_all(maps, spec) == {}


def test_expert_weights_have_an_expert_dimension():
    local, canonical = local_and_canonical("qwen3_moe", tp=2, tp_rank=1)
    name = "model.layers.0.mlp.experts.routed_experts"
    gate, up, down = (canonical[f"model.layers.0.mlp.experts.5.{part}_proj.weight"] for part in ("gate", "up", "down"))
    assert local[f"{name}.w13_weight"].shape == (8, 24, 32)
    assert np.array_equal(local[f"{name}.w13_weight"][5], np.concatenate([gate[12:], up[12:]]))
    assert np.array_equal(local[f"{name}.w2_weight"][5], down[:, 12:])


def test_few_kv_heads_are_replicated():
    local, canonical = local_and_canonical("qwen2", tp=4, tp_rank=2)
    for kind in ("weight", "bias"):
        q, k, v = (canonical[f"model.layers.0.self_attn.{part}_proj.{kind}"] for part in "qkv")
        expected = np.concatenate([q[16:24], k[8:], v[8:]])
        assert np.array_equal(local[f"model.layers.0.self_attn.qkv_proj.{kind}"], expected)


def test_mla_fuses_both_down_projections_on_every_worker():
    local, canonical = local_and_canonical("deepseek_v3", tp=2, tp_rank=1)
    prefix = "model.layers.0.self_attn"
    q, kv = (canonical[f"{prefix}.{part}.weight"] for part in ("q_a_proj", "kv_a_proj_with_mqa"))
    assert np.array_equal(local[f"{prefix}.fused_qkv_a_proj.weight"], np.concatenate([q, kv]))
    assert np.array_equal(local[f"{prefix}.kv_b_proj.weight"], canonical[f"{prefix}.kv_b_proj.weight"][28:])
    local, canonical = local_and_canonical("moonlight", tp=2, tp_rank=1)
    assert f"{prefix}.fused_qkv_a_proj.weight" not in local
    assert np.array_equal(
        local[f"{prefix}.kv_a_proj_with_mqa.weight"], canonical[f"{prefix}.kv_a_proj_with_mqa.weight"]
    )


def test_the_correction_bias_and_the_router_of_glm_stay_float32():
    tensors = declare(model_spec(FAMILIES["glm4_moe"]), tp=1, dtype=DType.BFLOAT16).tensors
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype is DType.FLOAT32
    assert tensors["model.layers.1.mlp.gate.weight"].dtype is DType.FLOAT32
    tensors = declare(model_spec(FAMILIES["deepseek_v3"]), tp=1, dtype=DType.BFLOAT16).tensors
    assert tensors["model.layers.1.mlp.gate.weight"].dtype is DType.BFLOAT16


def test_gpt_oss_keeps_gate_and_up_in_alternation_under_its_own_names():
    local, canonical = local_and_canonical("gpt_oss", tp=2, tp_rank=1)
    stored = canonical["model.layers.0.mlp.experts.gate_up_proj"].reshape(8, 32, 96)
    name = "model.layers.0.mlp.experts.routed_experts"
    assert np.array_equal(local[f"{name}.w13_weight"], stored[:, :, 48:].transpose(0, 2, 1))
    down = canonical["model.layers.0.mlp.experts.down_proj"]
    assert np.array_equal(local[f"{name}.w2_weight"], down[:, 24:].transpose(0, 2, 1))
    assert np.array_equal(local["model.layers.0.attn.sinks"], canonical["model.layers.0.self_attn.sinks"][2:])
    assert "model.embedding.weight" in local


def test_gpt_oss_counts_the_bias_of_down_on_one_worker():
    maps = [declare(model_spec(FAMILIES["gpt_oss"]), tp_rank=rank, tp=2) for rank in range(2)]
    name = "model.layers.0.mlp.experts.routed_experts.w2_bias"
    assert [shard_map.padding.get(name) for shard_map in maps] == [None, 8 * 32]


def test_the_first_workers_take_the_remaining_experts():
    assert [len(linear_experts(10, 4, rank)) for rank in range(4)] == [3, 3, 2, 2]
    assert list(linear_experts(10, 4, 2)) == [6, 7]


def test_round_robin_deals_experts_one_by_one():
    assert list(placed_experts(ExpertPlacement.ROUND_ROBIN, 10, 4, 1)) == [1, 5, 9]


def test_moved_experts_lie_in_the_slots_of_the_expert_map():
    slots = (7, 6, 5, 4, 3, 2, 1, 0, 3, 3)
    options = {"tp": 2, "tp_rank": 1, "has_expert_parallel": True, "physical_to_logical": {0: slots}}
    local, canonical = local_and_canonical("qwen3_moe", **options)
    w2 = local["model.layers.0.mlp.experts.routed_experts.w2_weight"]
    expected = [canonical[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"] for expert in (2, 1, 0, 3, 3)]
    assert np.array_equal(w2, np.stack(expected))
    assert local["model.layers.1.mlp.experts.routed_experts.w2_weight"].shape == (4, 32, 24)


def test_middle_stages_take_the_remaining_layers():
    assert [len(layers_of_stage(10, 4, rank, None)) for rank in range(4)] == [2, 3, 3, 2]
    assert [len(layers_of_stage(5, 2, rank, None)) for rank in range(2)] == [3, 2]


def test_stages_keep_global_layer_numbers_and_tied_ends_the_embedding():
    tied = model_spec(FAMILIES["qwen3-tied"])
    first, last = (declare(tied, pp_rank=rank, tp=1, pp=2).tensors for rank in range(2))
    assert "model.layers.2.mlp.down_proj.weight" in last and "model.layers.2.mlp.down_proj.weight" not in first
    assert "model.embed_tokens.weight" in first and "model.embed_tokens.weight" in last
    assert "lm_head.weight" not in last


def test_what_cannot_be_placed_is_named():
    spec = model_spec(FAMILIES["qwen3_moe"])
    with pytest.raises(LayoutError, match=r"model.embed_tokens.weight: 128 does not divide by rollout tp_size 3"):
        declare(spec, tp=3)
    with pytest.raises(
        LayoutError, match=r"model.layers.0.self_attn query heads: 4 does not divide by rollout tp_size 8"
    ):
        declare(spec, tp=8)
    with pytest.raises(LayoutError, match=r"mlp.experts: the expert map and the layer's 8 experts differ in \[7, 9\]"):
        declare(spec, tp=1, has_expert_parallel=True, physical_to_logical={0: (0, 1, 2, 3, 4, 5, 6, 9)})
    with pytest.raises(LayoutError, match=r"9 expert slots do not divide by 2 ranks"):
        declare(spec, tp=2, has_expert_parallel=True, physical_to_logical={0: (*range(8), 0)})
    with pytest.raises(LayoutError, match=r"layer partition \[1, 1\] does not spread 4 layers over 2 ranks"):
        declare(spec, tp=1, pp=2, layer_partition=(1, 1))
