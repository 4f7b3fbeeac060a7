"""Weight syncs: planned with experts in bundles, they move the same bytes over the same links as the run's own plan."""

from __future__ import annotations

import pytest

from hybridrl.config.choices import Platform
from hybridrl.config.schema import ExperimentConfig, ParallelConfig, PlacementConfig
from hybridrl.layout.families import model_spec
from hybridrl.layout.roles import megatron_roles
from hybridrl.planning.bundles import ExpertBundles, bundled, largest_bundle, smallest_bundle
from hybridrl.planning.layouts import role_layout
from hybridrl.planning.parameters import stage_parameters
from hybridrl.planning.weight_sync import plan_weight_sync
from hybridrl.reshard.topology import LinkClass
from tests.unit.layout.models import FAMILIES
from tests.unit.planning.recipes import RECIPES, cluster, planned, recipe


def experiment(
    parallel: ParallelConfig, placement: PlacementConfig, num_replicas: int, tp_size: int
) -> ExperimentConfig:
    config = ExperimentConfig(platform=Platform.CUDA, placement=placement)
    config.actor.parallel = parallel
    config.rollout.num_replicas, config.rollout.tp_size = num_replicas, tp_size
    config.weight_sync.chunk_mib = 1
    return config


SPLIT, SHARED = PlacementConfig(rollout="rollout"), PlacementConfig()
CASES = [
    ("qwen3_moe", ParallelConfig(tp_size=2, pp_size=2, ep_size=2, dp_size=2), SPLIT, 4, 2),
    ("qwen3_moe", ParallelConfig(tp_size=2, ep_size=2, dp_size=2), SHARED, 4, 1),
    ("mixtral", ParallelConfig(tp_size=4, ep_size=2, etp_size=2), SPLIT, 1, 4),
    ("deepseek_v3", ParallelConfig(pp_size=2, ep_size=2, dp_size=4), SHARED, 2, 2),
    ("glm4_moe", ParallelConfig(ep_size=2, etp_size=2, dp_size=4), SPLIT, 2, 2),
]


@pytest.mark.parametrize(("family", "parallel", "placement", "num_replicas", "tp_size"), CASES)
def test_bundles_change_no_byte_of_any_rank(family, parallel, placement, num_replicas, tp_size):
    config = experiment(parallel, placement, num_replicas, tp_size)
    spec, nodes = model_spec(FAMILIES[family]), cluster("h100")
    bundle = (
        next(layer.mlp.num_experts for layer in spec.layers if hasattr(layer.mlp, "num_experts")) // parallel.ep_size
    )
    assert bundle > 1
    fine, coarse = (plan_weight_sync(config, model, nodes).price for model in (spec, bundled(spec, bundle)))
    assert coarse.link_bytes == fine.link_bytes
    assert coarse.wire_bytes == fine.wire_bytes == fine.lower_bound_bytes == coarse.lower_bound_bytes > 0
    for a, b in zip(fine.destinations, coarse.destinations, strict=True):
        assert a.received_bytes == b.received_bytes


@pytest.mark.parametrize(("family", "parallel", "placement", "num_replicas", "tp_size"), CASES)
def test_bundles_change_no_parameter_of_any_stage(family, parallel, placement, num_replicas, tp_size):
    config = experiment(parallel, placement, num_replicas, tp_size)
    spec = model_spec(FAMILIES[family])
    held = (
        stage_parameters(role_layout(config, megatron_roles(config)[0], model)) for model in (spec, bundled(spec, 2))
    )
    for fine, coarse in zip(*held, strict=True):
        assert (fine.num_dense, fine.num_expert, fine.model_bytes) == (
            coarse.num_dense,
            coarse.num_expert,
            coarse.model_bytes,
        )


def test_a_weight_sync_is_planned_in_bundles_where_its_plan_would_be_large():
    found = [
        (smallest_bundle(c.config, c.spec), largest_bundle(c.config.actor.parallel, c.spec))
        for c in map(recipe, RECIPES)
    ]
    assert found == [(1, 16), (8, 16), (32, 32)]


def test_experts_whose_matrices_are_padded_stay_apart():
    config = experiment(ParallelConfig(ep_size=2, etp_size=2, dp_size=4), SPLIT, 1, 1)
    spec = model_spec(FAMILIES["qwen3_moe"])  # 24 x 32 in two parts: 6 times 64 elements
    assert largest_bundle(config.actor.parallel, spec) == 4
    config.actor.parallel.etp_size = 8
    assert largest_bundle(config.actor.parallel, spec) == 1


def test_a_bundle_is_an_expert_of_as_many_times_the_size():
    small = model_spec(FAMILIES["qwen3_moe"])
    assert bundled(small, 1) is small
    layer = bundled(small, 4).layers[0].mlp
    assert isinstance(layer, ExpertBundles) and (layer.num_experts, layer.intermediate_size) == (2, 96)


def test_a_sync_between_roles_of_their_own_brings_every_worker_all_its_weights():
    plan = planned("qwen3-30b-a3b")
    price = plan.sync.price
    assert plan.sync.transport == "nccl"
    assert price.link_bytes[LinkClass.DEVICE] == 0
    assert price.wire_bytes == price.lower_bound_bytes == 8 * plan.memory.replica.weight_bytes
    assert price.lower_bound_seconds <= price.seconds < 10


def test_on_shared_devices_what_a_device_holds_stays_off_the_wire():
    overrides = (
        "placement.rollout=train",
        "rollout.num_replicas=8",
        "rollout.tp_size=1",
        "rollout.gpu_memory_fraction=0.5",
    )
    price = planned("qwen3-30b-a3b", *overrides).sync.price
    assert price.link_bytes[LinkClass.DEVICE] > 0
    assert price.link_bytes[LinkClass.NETWORK] == 0
    assert price.wire_bytes == price.lower_bound_bytes


def test_ranks_of_a_cpu_run_have_memory_of_their_own_though_they_share_a_host():
    config = experiment(ParallelConfig(tp_size=2, ep_size=2), SHARED, 1, 1)
    config.platform = Platform.CPU
    sync = plan_weight_sync(config, model_spec(FAMILIES["qwen3_moe"]), cluster("cpu"))
    assert sync.transport == "shm" and sync.price.link_bytes[LinkClass.DEVICE] == 0


def test_a_transport_that_was_asked_for_is_the_one_that_is_planned():
    assert planned("qwen3-30b-a3b", "weight_sync.transport=nccl").sync.transport == "nccl"
