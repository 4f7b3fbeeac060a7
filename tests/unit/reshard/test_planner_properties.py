"""Every plan, over random models and layouts, is exact, minimal and even, and every rank sees its own part of it."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import MegatronLayout
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.vllm import VllmLayout
from hybridrl.reshard.bound import lower_bounds
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.worlds import Devices, megatron_world, vllm_world
from tests.unit.layout.models import QWEN3_MOE
from tests.unit.reshard.random_worlds import World, cut_worlds, megatron_worlds, vllm_worlds, worlds
from tests.unit.reshard.simulation import brute_force_bytes, carry_out, count_per_node, cut_all


def moves_into(plan, destination):
    """Yield the table of moves and that of relays, each with the rows that go to one destination."""
    for table in (plan.moves, plan.relays):
        yield table.take(table.destination == destination)


def check_exact(plan, destinations, have, want):
    """Every element has the right value, and as many were written as there are: so each was written exactly once."""
    for rank, got in enumerate(carry_out(plan, have, destinations)):
        for name, expected in want[rank].items():
            assert np.array_equal(got[name], expected, equal_nan=True), (rank, name)
        num_written = sum(int(table.boxes.volumes().sum()) for table in moves_into(plan, rank))
        assert num_written == sum(int((~np.isnan(values)).sum()) for values in want[rank].values())


def check_minimal(plan, world, canonical):
    """Each destination takes off the wire what its device lacks, and when sharing each node what the node lacks."""
    bounds = brute_force_bytes(world.sources, world.destinations, canonical)
    received = [
        sum(int((table.num_bytes * table.is_wire).sum()) for table in moves_into(plan, rank))
        for rank in range(len(bounds))
    ]
    assert received == bounds == lower_bounds(world.sources, world.destinations)
    assert plan.wire_bytes == sum(bounds)
    if world.is_shared:
        crossing = dict.fromkeys((place.node for place in plan.destinations), 0)
        for move in plan.moves:
            if plan.sources[move.source].node != (node := plan.destinations[move.destination].node):
                crossing[node] += move.num_bytes
        assert crossing == count_per_node(world.sources, world.destinations, canonical)


def nearness(source, destination):
    same_node = source.node == destination.node
    return same_node, same_node and source.device == destination.device


def check_even(plan, sources):
    """Replicas that are equally near to every destination differ by at most one piece."""
    moves = plan.moves
    served = np.bincount(moves.source, weights=moves.num_bytes * moves.is_wire, minlength=len(sources))
    for (a, one), (b, other) in itertools.combinations(enumerate(sources), 2):
        if one.shards is other.shards and all(
            nearness(one.place, d) == nearness(other.place, d) for d in plan.destinations
        ):
            largest = moves.num_bytes[np.isin(moves.source, [a, b])].max(initial=0)
            assert abs(served[a] - served[b]) <= largest, (one.place, other.place)


def check_parts(planner, plan):
    """Sources and destinations agree: the parts are the plan, in its order."""
    served, received = ([[] for _ in side] for side in (plan.sources, plan.destinations))
    for move in plan.moves:
        served[move.source].append(move)
        received[move.destination].append(move)
    for index, moves in enumerate(served):
        assert list(planner.for_source(index).moves) == moves
    for index, moves in enumerate(received):
        part = planner.for_destination(index)
        assert list(part.moves) == moves
        assert list(part.relays) == [m for m in plan.relays if index in (m.source, m.destination)]
        assert part.chunks[index] == plan.chunks[index]


def check_chunks(plan, chunk_bytes):
    for rank, chunks in enumerate(plan.chunks):
        filled = np.zeros(len(chunks), np.int64)
        largest = 0
        for table in moves_into(plan, rank):
            assert sorted(table.chunk.tolist()) == table.chunk.tolist()
            np.add.at(filled, table.chunk, table.num_bytes)
            one_row = table.num_bytes // (table.boxes.stop - table.boxes.start)[:, 0]
            largest = max(largest, one_row.max(initial=0))
        assert (filled <= max(chunk_bytes, largest)).all()


def check_relays(plan):
    """What a destination passes on, it received from a source, in the same chunk, into where the relay reads."""
    received = {(m.destination, m.tensor, m.box): (m.chunk, m.write) for m in plan.moves}
    for relay in plan.relays:
        assert plan.destinations[relay.source].node == plan.destinations[relay.destination].node
        assert received[relay.source, relay.tensor, relay.box] == (relay.chunk, relay.read)


def check(world):
    planner = Planner(
        world.sources,
        world.destinations,
        chunk_bytes=world.chunk_bytes,
        is_staggered=world.is_staggered,
        is_shared=world.is_shared,
    )
    plan = planner.whole()
    canonical = world.canonical()
    have, want = cut_all(world.sources, canonical), cut_all(world.destinations, canonical)
    check_exact(plan, world.destinations, have, want)
    check_minimal(plan, world, canonical)
    check_even(plan, world.sources)
    check_parts(planner, plan)
    check_chunks(plan, world.chunk_bytes)
    check_relays(plan)


@pytest.mark.parametrize("generation", [vllm_worlds, megatron_worlds])
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_model_from_any_layout_to_any_layout(generation, data):
    check(data.draw(worlds(generation)))


def test_the_random_worlds_make_use_of_every_kind_of_layout():
    seen = set()

    @settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(worlds(vllm_worlds))
    def draw(world):
        for side, ranks in (("training", world.sources), ("generation", world.destinations)):
            seen.update(f"{side} {trait}" for trait in ranks.traits)
        seen.update(name for name in ("is_staggered", "is_shared") if getattr(world, name))

    draw()
    training = ("tp_beyond_kv_heads", "pp", "vpp", "uneven", "ep", "etp", "dp", "interleaved_glu")
    generation = ("tp_beyond_kv_heads", "pp", "ep", "dp", "replicas", "uneven_experts")
    expected = {f"training {trait}" for trait in training} | {f"generation {trait}" for trait in generation}
    assert seen >= expected | {"is_staggered", "is_shared", "training TE_GROUPED", "training SINGLE_GROUPED"}


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(world=cut_worlds())
def test_any_cut_of_any_tensors(world):
    check(world)


def test_64_training_ranks_to_64_generation_ranks():
    spec = model_spec(QWEN3_MOE | {"num_hidden_layers": 4})
    sizes = ParallelSizes(tp=4, pp=4, ep=8, etp=2, dp=4)
    sources = megatron_world(MegatronLayout(spec, sizes, DType.FLOAT32), Devices(8))
    destinations = vllm_world(VllmLayout(spec, 4, DType.FLOAT32, True, dp=2), 8, Devices(8, first=64))
    check(World(spec, sources, destinations, 1 << 14, is_staggered=True))


def test_64_training_ranks_to_64_generation_ranks_that_share():
    spec = model_spec(QWEN3_MOE | {"num_hidden_layers": 4})
    sizes = ParallelSizes(tp=4, pp=4, ep=8, etp=2, dp=4)
    sources = megatron_world(MegatronLayout(spec, sizes, DType.FLOAT32), Devices(8))
    destinations = vllm_world(VllmLayout(spec, 4, DType.FLOAT32, True, pp=2), 8, Devices(16, first=64))
    check(World(spec, sources, destinations, 1 << 14, is_staggered=True, is_shared=True))
