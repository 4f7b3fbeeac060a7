"""Plans are exact, minimal, balanced and refuse what cannot be covered."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import ReshardError
from hybridrl.layout.box import Box, DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import MegatronLayout, megatron_shard_map
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import Place
from hybridrl.reshard.planner import build_plan, lower_bound_bytes
from tests.unit.layout.models import QWEN3_DENSE, QWEN3_MOE, fill_local, random_canonical

SPEC = model_spec(QWEN3_MOE)


def world(sizes, role, dtype=DType.FLOAT32, spec=SPEC, first_device=0, divisor=1):
    layout = MegatronLayout(spec, sizes, dtype, vocab_divisor=divisor)
    return [
        megatron_shard_map(layout, Place(role, rank, f"node{rank // 4}", f"{first_device + rank}"))
        for rank in range(sizes.world_size)
    ]


def valid_sizes():
    return [
        ParallelSizes(tp, pp, ep, etp, 1, dp)
        for tp, pp, ep, etp, dp in itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2), (1, 2))
        if tp * dp % (ep * etp) == 0
    ]


def run_plan(plan, sources, destinations, canonical):
    """Carry a plan out element by element; NaN marks what was never written."""
    have = [fill_local(m, canonical) for m in sources]
    got = [{name: np.full(t.shape, np.nan, np.float32) for name, t in m.tensors.items()} for m in destinations]
    for move in plan.moves:
        read, write = (_indices(region, move.box.shape) for region in (move.read, move.write))
        target = got[move.destination][move.write.local].reshape(-1)
        assert np.isnan(target[write]).all(), f"{move.tensor} written twice"
        target[write] = have[move.source][move.read.local].reshape(-1)[read]
    return got


def _indices(region, shape):
    index = np.array([region.offset])
    for extent, stride in zip(shape, region.strides, strict=True):
        index = (index[:, None] + np.arange(extent)[None, :] * stride).ravel()
    return index


def brute_force_bytes(sources, destinations, itemsize=4):
    """Mark, element by element, what each destination wants and its device does not hold."""
    total = 0
    for destination in destinations:
        wanted = {name: np.zeros(t.shape, bool) for name, t in destination.canonical.items()}
        for shard in destination.shards:
            wanted[shard.tensor][_slices(shard.box)] = True
        for source in sources:
            if (source.place.node, source.place.device) == (destination.place.node, destination.place.device):
                for shard in source.shards:
                    if shard.tensor in wanted:
                        wanted[shard.tensor][_slices(shard.box)] = False
        total += itemsize * sum(int(mask.sum()) for mask in wanted.values())
    return total


def _slices(box):
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    source=st.sampled_from(valid_sizes()),
    destination=st.sampled_from(valid_sizes()),
    shared=st.booleans(),
    chunk_bytes=st.sampled_from([512, 5000, 1 << 20]),
    divisors=st.tuples(st.sampled_from([1, 16]), st.sampled_from([1, 64])),
)
def test_any_layout_to_any_layout_is_exact_and_minimal(source, destination, shared, chunk_bytes, divisors):
    sources = world(source, "actor", divisor=divisors[0])
    destinations = world(destination, "rollout", first_device=0 if shared else 100, divisor=divisors[1])
    plan = build_plan(sources, destinations, chunk_bytes=chunk_bytes)
    canonical = random_canonical(SPEC)
    for got, shard_map in zip(run_plan(plan, sources, destinations, canonical), destinations, strict=True):
        for name, expected in fill_local(shard_map, canonical).items():
            assert np.array_equal(got[name], expected, equal_nan=True)
    assert plan.wire_bytes == lower_bound_bytes(sources, destinations) == brute_force_bytes(sources, destinations)


def test_equal_replicas_share_the_work():
    sources, destinations = (
        world(ParallelSizes(dp=4, ep=1), "actor"),
        world(ParallelSizes(tp=2), "rollout", first_device=9),
    )
    sources = [replace(m, place=replace(m.place, node="a")) for m in sources]
    plan = build_plan(sources, destinations)
    served = [sum(m.num_bytes for m in plan.moves if m.source == index) for index in range(4)]
    assert max(served) - min(served) <= max(m.num_bytes for m in plan.moves)


def test_same_device_then_same_node_is_preferred():
    sources = world(ParallelSizes(dp=2), "actor")
    sources = [
        replace(sources[0], place=Place("actor", 0, "far", "0")),
        replace(sources[1], place=Place("actor", 1, "near", "0")),
    ]
    destination = world(ParallelSizes(), "rollout")[0]
    near = replace(destination, place=Place("rollout", 0, "near", "7"))
    assert {m.source for m in build_plan(sources, [near]).moves} == {1}
    same = replace(destination, place=Place("rollout", 0, "far", "0"))
    assert build_plan(sources, [same]).wire_bytes == 0


def test_narrower_type_travels():
    plan = build_plan(
        world(ParallelSizes(), "actor"), world(ParallelSizes(), "rollout", DType.BFLOAT16, first_device=9)
    )
    assert plan.wire_bytes == 2 * sum(int(np.prod(t.shape)) for t in SPEC.tensors().values())


def test_chunks_are_bounded_and_complete_every_tensor_once():
    destinations = world(ParallelSizes(tp=2, ep=2), "rollout", first_device=9)
    plan = build_plan(world(ParallelSizes(pp=2), "actor"), destinations, chunk_bytes=4096)
    for index, shard_map in enumerate(destinations):
        sizes = {}
        for move in plan.moves:
            if move.destination == index:
                sizes[move.chunk] = sizes.get(move.chunk, 0) + move.num_bytes
        assert max(sizes.values()) <= 4096
        completed = [name for chunk in plan.chunks[index] for name in chunk.completed]
        assert sorted(completed) == sorted(shard_map.tensors)


def test_plan_is_deterministic():
    arguments = world(ParallelSizes(tp=2, dp=2), "actor"), world(ParallelSizes(pp=2), "rollout", first_device=9)
    assert build_plan(*arguments).moves == build_plan(*arguments).moves


def test_missing_range_is_named():
    sources = world(ParallelSizes(ep=2, dp=2), "actor")
    with pytest.raises(
        ReshardError, match=r"experts\.4\.gate_proj\.weight \[0:24, 0:32\]: no source holds it, but rollout rank 0"
    ):
        build_plan(sources[:1], world(ParallelSizes(), "rollout"))


def test_other_model_is_refused():
    other = model_spec(QWEN3_DENSE | {"vocab_size": 60})
    with pytest.raises(
        ReshardError, match=r"embed_tokens.weight: shape \(100, 32\) at actor rank 0, but \(60, 32\) at rollout"
    ):
        build_plan(world(ParallelSizes(), "actor"), world(ParallelSizes(), "rollout", spec=other))


def test_double_home_is_refused():
    destination = world(ParallelSizes(), "rollout")[0]
    first = destination.shards[0]
    twice = replace(
        destination,
        shards=(*destination.shards, replace(first, local="copy")),
        tensors={**destination.tensors, "copy": replace(destination.tensors[first.local], name="copy")},
    )
    with pytest.raises(ReshardError, match=r"embed_tokens.weight \[0:100, 0:32\] has two homes"):
        build_plan(world(ParallelSizes(), "actor"), [twice])


def test_partly_overlapping_sources_are_cut_into_cells():
    base = world(ParallelSizes(), "actor")[0]
    halves = []
    for index, rows in enumerate([range(70), range(40, 100)]):
        shards = []
        for shard in base.shards:
            if shard.tensor == SPEC.embedding:
                box = Box((rows.start, 0), (rows.stop, 32))
                shards.append(replace(shard, box=box, offset=shard.offset_of(box)))
            else:
                shards.append(shard)
        halves.append(replace(base, shards=tuple(shards), place=Place("actor", index, "n", str(index))))
    destination = world(ParallelSizes(), "rollout", first_device=9)
    canonical = random_canonical(SPEC)
    plan = build_plan(halves, destination)
    assert sum(m.num_bytes for m in plan.moves if m.tensor == SPEC.embedding) == 100 * 32 * 4
    full = [replace(h, shards=base.shards) for h in halves]
    got = run_plan(plan, full, destination, canonical)[0]
    assert np.array_equal(got["0.embedding.word_embeddings.weight"], canonical[SPEC.embedding])
