"""Every family in many Megatron layouts: each local element written once, the whole checkpoint held by the ranks together."""

import pytest

from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import (
    ExpertContainer,
    LayerSpec,
    MegatronLayout,
    PipelineLayout,
    megatron_shard_map,
)
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import Place
from tests.unit.layout.models import (
    EXPERT_FAMILIES,
    FAMILIES,
    MTP_FAMILIES,
    fill_local,
    held_by_all,
    random_canonical,
)

TE = LayerSpec.TRANSFORMER_ENGINE
LAYOUTS = {
    "one": (ParallelSizes(), {}),
    "tp2": (ParallelSizes(tp=2), {}),
    "tp4": (ParallelSizes(tp=4), {"vocab_divisor": 16}),
    "dp2": (ParallelSizes(dp=2), {}),
    "pp2": (ParallelSizes(pp=2), {}),
    "tp2-pp2-ep2": (ParallelSizes(tp=2, pp=2, ep=2), {}),
    "pp2-vpp2": (ParallelSizes(pp=2), {"pipeline": PipelineLayout(virtual_size=2)}),
    "pp4-tp2": (ParallelSizes(tp=2, pp=4), {}),
    "uneven-first": (ParallelSizes(pp=2), {"pipeline": PipelineLayout(num_layers_in_first_pipeline_stage=1)}),
    "uneven-last": (ParallelSizes(pp=2, dp=2), {"pipeline": PipelineLayout(num_layers_in_last_pipeline_stage=1)}),
    "accounted": (
        ParallelSizes(pp=3),
        {
            "pipeline": PipelineLayout(
                account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
            )
        },
    ),
    "ep4": (ParallelSizes(dp=4, ep=4), {}),
    "tp2-ep2-etp2": (ParallelSizes(tp=2, dp=2, ep=2, etp=2), {}),
    "te": (ParallelSizes(), {"layer_spec": TE}),
    "te-tp2-ep2": (ParallelSizes(tp=2, ep=2), {"layer_spec": TE, "vocab_divisor": 128}),
    "te-etp2": (ParallelSizes(tp=2, etp=2, pp=2), {"layer_spec": TE}),
    "te-single-grouped": (ParallelSizes(dp=2, ep=2), {"layer_spec": TE, "experts": ExpertContainer.SINGLE_GROUPED}),
    "te-interleaved-1": (ParallelSizes(tp=2, etp=2), {"layer_spec": TE, "glu_interleave_size": 1}),
    "te-interleaved-4": (ParallelSizes(dp=2, ep=2), {"layer_spec": TE, "glu_interleave_size": 4}),
    "te-fused-mla": (ParallelSizes(tp=2, dp=2), {"layer_spec": TE, "is_mla_down_fused": True}),
}


def without_experts(sizes: ParallelSizes) -> ParallelSizes:
    return ParallelSizes(tp=sizes.tp, pp=sizes.pp, dp=sizes.dp)


def shard_maps(spec, sizes, **options):
    layout = MegatronLayout(spec, sizes, DType.FLOAT32, **options)
    return [megatron_shard_map(layout, Place("actor", rank, "node", f"cpu:{rank}")) for rank in range(sizes.world_size)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_each_element_once_and_the_whole_checkpoint_together(family, layout):
    sizes, options = LAYOUTS[layout]
    spec = model_spec(FAMILIES[family])
    maps = shard_maps(spec, sizes if family in EXPERT_FAMILIES else without_experts(sizes), **options)
    canonical = random_canonical(spec)
    for shard_map in maps:
        fill_local(shard_map, canonical)
    assert held_by_all(maps, spec) == {}


STAGES = {"Et|tttmL": 2, "E|tt|tt|mL": 2, "E|t|t|t|t|mL": 6, "Et|(t|)*3mL": 5, "Et*4|mL": 2}


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_listed_stages_with_prediction_layers_hold_the_whole_checkpoint(family, stages):
    spec = model_spec(MTP_FAMILIES[family], has_mtp=True)
    sizes = ParallelSizes(tp=2, pp=STAGES[stages], ep=2)
    maps = shard_maps(spec, sizes, pipeline=PipelineLayout(stages=stages), layer_spec=TE)
    canonical = random_canonical(spec)
    for shard_map in maps:
        fill_local(shard_map, canonical)
    assert held_by_all(maps, spec) == {}
