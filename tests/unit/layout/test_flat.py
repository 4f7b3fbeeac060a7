"""Flat ranges of local tensors: every held element is in exactly one box, and at its place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.box import Box, DType
from hybridrl.layout.builder import check_local_coverage
from hybridrl.layout.families import model_spec
from hybridrl.layout.flat import flat_shard_map
from hybridrl.layout.megatron import MegatronLayout, megatron_shard_map
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.shard import CanonicalTensor, LocalTensor, Place, Shard, ShardMap
from tests.unit.layout.models import FAMILIES, fill_local, random_canonical

PLACE = Place("actor", 0, "node", "cpu:0")


def test_the_worked_example_of_the_module() -> None:
    whole = ShardMap(
        PLACE,
        {"w": LocalTensor("w", (4, 8), DType.BFLOAT16)},
        (Shard("w", Box((0, 0), (4, 8)), "w", 0, (8, 1)),),
        {"w": CanonicalTensor("w", (4, 8))},
    )
    held = flat_shard_map(whole, {"w": range(10, 28)}, DType.FLOAT32)
    assert held.tensors == {"w": LocalTensor("w", (18,), DType.FLOAT32)}
    assert sorted((shard.offset, str(shard.box)) for shard in held.shards) == [
        (0, "[1:2, 2:8]"), (6, "[2:3, 0:8]"), (14, "[3:4, 0:4]"),
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_ranges_of_a_megatron_rank_hold_the_values_of_its_tensors(family: str, data: st.DataObject) -> None:
    spec = model_spec(FAMILIES[family])
    layout = MegatronLayout(spec, parallel_sizes(ParallelConfig(tp_size=2, ep_size=2, pp_size=2)), DType.FLOAT32)
    shard_map = megatron_shard_map(layout, Place("actor", data.draw(st.integers(0, 3)), "node", "cpu:0"))
    canonical = random_canonical(spec)
    tensors = fill_local(shard_map, canonical)
    ranges = {}
    for name, values in tensors.items():
        start = data.draw(st.integers(0, values.size - 1))
        ranges[name] = range(start, data.draw(st.integers(start + 1, values.size)))
    held = flat_shard_map(shard_map, ranges, DType.FLOAT32)
    check_local_coverage(held)
    for name, values in fill_local(held, canonical).items():
        part = tensors[name].reshape(-1)[ranges[name].start : ranges[name].stop]
        np.testing.assert_array_equal(values, part)


def test_tensors_without_a_range_are_not_in_the_map() -> None:
    spec = model_spec(FAMILIES["qwen3"])
    layout = MegatronLayout(spec, parallel_sizes(ParallelConfig()), DType.FLOAT32)
    shard_map = megatron_shard_map(layout, PLACE)
    name = next(iter(shard_map.tensors))
    held = flat_shard_map(shard_map, {name: range(1, 3)}, DType.FLOAT32)
    assert list(held.tensors) == [name] and {shard.local for shard in held.shards} == {name}
