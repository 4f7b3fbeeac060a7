"""Staggered destinations begin in different places, keep modules whole, and so take turns at the sources."""

import pytest

from hybridrl.layout.box import Box, DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import MegatronLayout
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import CanonicalTensor, LocalTensor, Place, Shard, ShardMap
from hybridrl.layout.vllm import VllmLayout
from hybridrl.reshard.planner import build_plan, lower_bound_bytes
from hybridrl.reshard.pricing import price_plan
from hybridrl.reshard.topology import Topology
from hybridrl.reshard.worlds import Devices, megatron_world, vllm_world
from tests.unit.layout.models import QWEN3_MOE

NAMES = [f"{module}.{part}" for module in "abcd" for part in "12"]


def whole_map(role, rank):
    """Return the map of a rank that holds modules a, b, c and d, each of two tensors of 5 bytes."""
    return ShardMap(
        Place(role, rank, f"{role}{rank}", "0"),
        {name: LocalTensor(name, (5,), DType.UINT8) for name in NAMES},
        tuple(Shard(name, Box((0,), (5,)), name, 0, (1,)) for name in NAMES),
        {name: CanonicalTensor(name, (5,)) for name in NAMES},
    )


def received(plan, destination):
    """Return the tensors of each chunk in the order of their arrival."""
    chunks = [[] for _ in plan.chunks[destination]]
    for move in plan.moves:
        if move.destination == destination:
            chunks[move.chunk].append(move.tensor.replace(".", ""))
    return [" ".join(chunk) for chunk in chunks]


def test_destinations_begin_at_different_modules_and_pieces():
    sides = [whole_map("actor", 0)], [whole_map("rollout", 0), whole_map("rollout", 1)]
    plan = build_plan(*sides, chunk_bytes=20, is_staggered=True)
    assert received(plan, 0) == ["a1 a2 b1 b2", "c1 c2 d1 d2"]
    assert received(plan, 1) == ["c2 c1 d2 d1", "a2 a1 b2 b1"]
    assert [chunk.completed for chunk in plan.chunks[1]] == [("c.2", "c.1", "d.2", "d.1"), ("a.2", "a.1", "b.2", "b.1")]


def test_without_staggering_all_begin_at_the_first():
    plan = build_plan([whole_map("actor", 0)], [whole_map("rollout", 0), whole_map("rollout", 1)], chunk_bytes=20)
    assert received(plan, 0) == received(plan, 1) == ["a1 a2 b1 b2", "c1 c2 d1 d2"]


def moe_world():
    spec = model_spec(QWEN3_MOE | {"num_hidden_layers": 4})
    training = MegatronLayout(spec, ParallelSizes(pp=4, ep=2, dp=2), DType.FLOAT32)
    return megatron_world(training, Devices(1)), vllm_world(VllmLayout(spec, 2, DType.FLOAT32), 4, Devices(1, first=8))


def test_a_module_is_open_once():
    plan = build_plan(*moe_world(), chunk_bytes=3000, is_staggered=True)
    for chunks in plan.chunks:
        modules = [name.rpartition(".")[0] for chunk in chunks for name in chunk.locals]
        runs = [module for index, module in enumerate(modules) if index == 0 or module != modules[index - 1]]
        assert len(runs) == len(set(runs))


def test_staggering_shares_the_pipeline_stages():
    sides, prices = moe_world(), {}
    topology = Topology("test", device_gb_per_s=1, node_gb_per_s=1, nic_gb_per_s=1, nics_per_node=1, message_s=0)
    for is_staggered in (False, True):
        plan = build_plan(*sides, chunk_bytes=3000, is_staggered=is_staggered)
        prices[is_staggered] = price_plan(plan, topology, lower_bound_bytes(*sides))
    assert prices[True].wire_bytes == prices[False].wire_bytes
    assert prices[True].seconds < 0.6 * prices[False].seconds
    assert prices[True].lower_bound_seconds == pytest.approx(prices[False].lower_bound_seconds)
