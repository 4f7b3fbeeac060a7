"""Parameters are counted, not estimated: against transformers, against files of the makers, and rank by rank."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import LayerSpec, MegatronLayout, PipelineLayout, megatron_shard_map
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import Place
from hybridrl.planning.parameters import ParameterBuffer, num_active_parameters, num_parameters, stage_parameters
from tests.unit.layout.models import FAMILIES, MTP_FAMILIES
from tests.unit.planning.recipes import RECIPES, hf_config, spec

# metadata.total_size of the makers' model.safetensors.index.json over 2 bytes; of DeepSeek-V3, whose files are in float8, the
# elements of the main model.
PUBLISHED = {
    "qwen3-30b-a3b": 61_064_245_248 // 2,
    "qwen3-235b-a22b": 470_187_269_120 // 2,
    "deepseek-v3": 671_026_419_200,
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_count_is_that_of_transformers_and_of_the_published_files(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config(name)))
    biases = sum(buffer.numel() for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias"))
    built = sum(parameter.numel() for parameter in model.parameters()) + biases
    assert num_parameters(spec(name)) == built == PUBLISHED[name]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_has_the_parameters_of_its_tensors(name):
    model = model_spec(FAMILIES[name])
    assert num_parameters(model) == sum(math.prod(tensor.shape) for tensor in model.tensors().values())


@pytest.mark.parametrize("name", sorted(MTP_FAMILIES))
def test_layers_that_predict_further_tokens_count(name):
    model = model_spec(MTP_FAMILIES[name], has_mtp=True)
    assert model.mtp_layers
    assert num_parameters(model) == sum(math.prod(tensor.shape) for tensor in model.tensors().values())


def test_active_parameters_leave_out_the_experts_that_a_token_is_not_sent_to():
    # DeepSeek-V3's technical report: 37 B activated of 671 B. Qwen3: 3.3 B of 30.5 B, 22 B of 235 B.
    assert [round(num_active_parameters(spec(name)) / 1e9, 1) for name in RECIPES] == [3.4, 22.2, 37.6]


@pytest.mark.parametrize(
    ("family", "sizes", "pipeline"),
    [
        ("qwen3_moe", ParallelSizes(tp=2, pp=2, ep=2, dp=1), PipelineLayout()),
        ("deepseek_v3", ParallelSizes(tp=2, pp=2, ep=2, etp=2, dp=2), PipelineLayout(virtual_size=2)),
    ],
)
def test_a_stage_holds_what_the_maps_of_its_ranks_hold(family, sizes, pipeline):
    layout = MegatronLayout(
        model_spec(FAMILIES[family]), sizes, DType.BFLOAT16, LayerSpec.TRANSFORMER_ENGINE, pipeline=pipeline
    )
    stages = stage_parameters(layout)
    for rank in range(sizes.world_size):
        tensors = megatron_shard_map(layout, Place("actor", rank, "", "")).tensors.values()
        stage = stages[sizes.coordinates(rank).pp]
        held = sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors)
        assert stage.model_bytes == held
        assert stage.num_layers == len(layout.spec.layers) // sizes.pp


def test_ranks_that_hold_the_same_parameters_are_counted_apart_for_experts():
    layout = MegatronLayout(
        model_spec(FAMILIES["qwen3_moe"]), ParallelSizes(tp=2, ep=4, dp=4), DType.BFLOAT16, LayerSpec.TRANSFORMER_ENGINE
    )
    (stage,) = stage_parameters(layout)
    assert {(b.is_expert, b.num_replicas) for b in stage.buffers} == {(False, 4), (True, 2)}
    # 8 experts of 3 x 24 x 32 in four layers on 4 ranks.
    assert stage.num_expert == 4 * (8 // 4) * 3 * 24 * 32


def test_a_buffer_is_aligned_as_megatron_aligns_it():
    # From the last parameter on: 10 at 0, 100 at 64, 7 at 192; the end is a multiple of 128 and of 3.
    buffer = ParameterBuffer(is_expert=False, dtype=DType.BFLOAT16, sizes=(7, 100, 10), num_replicas=3)
    assert (buffer.num_parameters, buffer.num_padded) == (117, 384)
