"""Plans prefer near sources, share work, keep to their chunks, and refuse what cannot be covered."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from hybridrl.errors import ReshardError
from hybridrl.layout.box import Box, DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import MegatronLayout, megatron_shard_map
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import Place
from hybridrl.reshard import geometry
from hybridrl.reshard.planner import build_plan, lower_bound_bytes, plan_for_destination, plan_for_source
from hybridrl.reshard.table import shard_tables
from tests.unit.layout.models import QWEN3_DENSE, QWEN3_MOE, random_canonical
from tests.unit.reshard.simulation import carry_out, cut_all

SPEC = model_spec(QWEN3_MOE)


def world(sizes, role, dtype=DType.FLOAT32, spec=SPEC, first_device=0, divisor=1):
    layout = MegatronLayout(spec, sizes, dtype, vocab_divisor=divisor)
    return [
        megatron_shard_map(layout, Place(role, rank, f"node{rank // 4}", f"{first_device + rank}"))
        for rank in range(sizes.world_size)
    ]


@pytest.mark.parametrize("sizes", [ParallelSizes(dp=4), ParallelSizes(tp=2, ep=4, dp=4)], ids=["whole", "ep"])
def test_equal_replicas_share_the_work(sizes):
    sources, destinations = (world(sizes, "actor"), world(ParallelSizes(tp=2, dp=3), "rollout", first_device=9))
    sources = [replace(m, place=replace(m.place, node="a")) for m in sources]
    destinations = [replace(m, place=replace(m.place, node="b")) for m in destinations]
    plan = build_plan(sources, destinations)
    served = [sum(m.num_bytes for m in plan.moves if m.source == index) for index in range(len(sources))]
    assert max(served) - min(served) <= max(m.num_bytes for m in plan.moves)


def test_a_rank_plans_its_own_part_and_all_agree():
    sides = world(ParallelSizes(tp=2, dp=2, pp=2), "actor"), world(ParallelSizes(tp=4), "rollout", first_device=9)
    whole = build_plan(*sides, chunk_bytes=4000)
    for index in range(8):
        part = plan_for_source(*sides, index, chunk_bytes=4000)
        assert list(part.moves) == [m for m in whole.moves if m.source == index]
    for index in range(4):
        part = plan_for_destination(*sides, index, chunk_bytes=4000)
        assert list(part.moves) == [m for m in whole.moves if m.destination == index]
        assert part.chunks[index] == whole.chunks[index]


def test_plans_from_tables_and_after_pickling_are_the_same():
    sides = world(ParallelSizes(tp=2, dp=2), "actor"), world(ParallelSizes(tp=4), "rollout", first_device=9)
    tables = pickle.loads(pickle.dumps([shard_tables(side) for side in sides]))
    assert pickle.loads(pickle.dumps(build_plan(*tables))) == build_plan(*sides)


def test_moves_are_a_sequence():
    moves = build_plan(world(ParallelSizes(tp=2), "actor"), world(ParallelSizes(), "rollout", first_device=9)).moves
    assert moves[-1] == list(moves)[-1] == moves[len(moves) - 1]
    assert list(moves[2:5]) == list(moves)[2:5]
    assert moves != moves[1:]
    with pytest.raises(IndexError):
        moves[len(moves)]


def test_one_tensor_in_two_types_is_refused():
    sources = world(ParallelSizes(), "actor"), world(ParallelSizes(), "reference", DType.BFLOAT16)
    with pytest.raises(
        ReshardError,
        match=r"embed_tokens.weight: F32 at actor rank 0, but BF16 at reference rank 0; keep a tensor in one",
    ):
        build_plan([*sources[0], *sources[1]], world(ParallelSizes(), "rollout", first_device=9))


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
    assert lower_bound_bytes(halves, destination) == plan.wire_bytes
    full = cut_all([replace(h, shards=base.shards) for h in halves], canonical)
    got = carry_out(plan, full, destination)[0]
    assert np.array_equal(got["0.embedding.word_embeddings.weight"], canonical[SPEC.embedding])


def test_replicas_add_no_work_but_their_own_deals(monkeypatch):
    """What is sorted, cut and intersected depends on the distinct maps only, however many ranks have them."""
    counted = []

    def match(left, right, own=geometry.match):
        i, j = own(left, right)
        counted[-1] += len(left) + len(right) + len(i)
        return i, j

    monkeypatch.setattr(geometry, "match", match)
    parts = []
    for num_replicas in (2, 64):
        counted.append(0)
        sources = world(ParallelSizes(tp=2, ep=2, dp=num_replicas), "actor")
        destinations = world(ParallelSizes(tp=4, dp=num_replicas), "rollout", first_device=1000)
        parts.append(plan_for_destination(sources, destinations, 1))
    assert counted[0] == counted[1] > 0
    assert len(parts[0].moves) == len(parts[1].moves)
    assert [bool(chunks) for chunks in parts[1].chunks].count(True) == 1
