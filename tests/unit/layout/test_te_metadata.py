"""The declared layout of Transformer Engine's layers against what real modules say of themselves.

``te_metadata/*.json`` are recorded by ``scripts/record_te_metadata.py``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import LayerSpec, MegatronLayout, megatron_shard_map
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.shard import Place

RECORDS = [json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "te_metadata").glob("*.json"))]
CASES = [
    pytest.param(record, run, group, rank, id=f"{record['megatron_core']}-{run['model']}-{run['parallel']}-{rank}")
    for record in RECORDS
    for run in record["runs"]
    for group in run["groups"]
    for rank in group["ranks"]
]
every_rank = pytest.mark.parametrize(("record", "run", "group", "rank"), CASES)


def _declared(record, run, rank):
    spec = model_spec(record["models"][run["model"]])
    sizes = parallel_sizes(ParallelConfig(**run["parallel"]))
    layout = MegatronLayout(spec, sizes, DType.BFLOAT16, LayerSpec.TRANSFORMER_ENGINE)
    return layout, megatron_shard_map(layout, Place("actor", rank, "node", f"cuda:{rank}"))


def _parts(layout, shard_map):
    """Return, per local tensor, the dimensions along which each canonical tensor in it is cut."""
    canonical, parts = layout.spec.tensors(), defaultdict(dict)
    for shard in shard_map.shards:
        shape = canonical[shard.tensor].shape
        cut = {dim for dim, (held, full) in enumerate(zip(shard.box.shape, shape, strict=True)) if held != full}
        parts[shard.local].setdefault(shard.tensor, set()).update(cut)
    return parts


def _is_expert(name):
    return ".mlp.experts." in name


def _stated_cut(version, layout, name, tensor):
    """Return the dimensions along which Megatron-core says that a tensor is cut."""
    if version == "0.16.1" and "_down_proj." in name:
        # It marks these as cut, although each rank makes them whole: 0.19.2 does not.
        assert tensor["tensor_model_parallel"]
        return set()
    if version == "0.16.1" and _is_expert(name) and "tensor_model_parallel" not in tensor:
        # It hides parallelism from Transformer Engine when it dispatches tokens itself, and marks nothing.
        return {0 if "linear_fc1" in name else 1} if layout.sizes.etp > 1 else set()
    degree = layout.sizes.etp if _is_expert(name) else layout.sizes.tp
    return {tensor["partition_dim"]} if tensor.get("tensor_model_parallel") and degree > 1 else set()


def test_both_ends_of_the_supported_versions_are_recorded():
    assert {record["megatron_core"] for record in RECORDS} == {"0.16.1", "0.19.2"}


@every_rank
def test_names_shapes_and_element_types_are_those_of_the_modules(record, run, group, rank):
    _, shard_map = _declared(record, run, rank)
    declared = {name: (list(tensor.shape), tensor.dtype.name.lower()) for name, tensor in shard_map.tensors.items()}
    assert declared == {name: (tensor["shape"], tensor["dtype"]) for name, tensor in group["tensors"].items()}


@every_rank
def test_every_part_of_a_tensor_is_cut_along_its_partition_dimension(record, run, group, rank):
    layout, shard_map = _declared(record, run, rank)
    parts = _parts(layout, shard_map)
    for name, tensor in group["tensors"].items():
        stated = _stated_cut(record["megatron_core"], layout, name, tensor)
        assert all(cut == stated for cut in parts[name].values()), (name, parts[name], stated)


@every_rank
def test_gate_above_up_is_stride_two_but_stated_of_dense_layers_only(record, run, group, rank):
    layout, shard_map = _declared(record, run, rank)
    parts = _parts(layout, shard_map)
    for name, tensor in group["tensors"].items():
        if "linear_fc1.weight" in name:
            assert len(parts[name]) == 2, name
            assert tensor.get("partition_stride", 1) == (1 if _is_expert(name) else 2), name
        elif "partition_stride" in tensor:
            assert tensor["partition_stride"] == 1, name
