"""Drives megatron-core's resharding planner on the CPU, from metadata that a training world would gather.

The metadata is what ``megatron.core.resharding.utils.extract_param_metadata`` reads off real modules (names, shapes, partition
attributes, ranks of the groups), written down from the declared layout instead, so that no process group is needed.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from hybridrl.layout.megatron import MegatronLayout
from hybridrl.layout.shard import LocalTensor
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.table import shard_tables
from hybridrl.reshard.worlds import Devices, megatron_world

T = TypeVar("T")

_RANK = 3
_ROWS_ACROSS_TP = ("linear_qkv.weight", "linear_fc1.weight", "word_embeddings.weight", "output_layer.weight")
_COLUMNS_ACROSS_TP = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both planners on one case, for one rank that has both layouts.

    Attributes:
        seconds: The rank's whole plan, sends and receipts, from the tables of all ranks.
        megatron_seconds: The same from the rosters of all ranks.
        received_bytes: What the rank receives, from itself included; with Megatron-core also vocabulary padding.
        wire_bytes: Of these, what it receives from other ranks.
    """

    name: str
    version: str
    seconds: float
    megatron_seconds: float
    speedup: float
    received_bytes: int
    megatron_received_bytes: int
    wire_bytes: int
    megatron_wire_bytes: int


def compare(folder: Path, name: str, source: MegatronLayout, destination: MegatronLayout, repeats: int) -> Comparison:
    """Time both planners in turn, so that both meet the same state of the machine.

    Args:
        folder: Where megatron-core is installed.
        source: Every rank has a part of it, and one of `destination`.
    """
    sys.path.insert(0, str(folder))
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import megatron.core
    from megatron.core.resharding import planner as megatron_planner

    sides = [shard_tables(megatron_world(layout, Devices(8))) for layout in (source, destination)]
    gathered = list(zip(_roster(source), _roster(destination), strict=True))

    def plan_ours() -> Plan:
        planner = Planner(sides[0], sides[1])
        planner.for_source(_RANK)
        return planner.for_destination(_RANK)

    def plan_theirs() -> Any:
        rosters = megatron_planner.index_metadata_rosters(gathered)
        return megatron_planner.build_plan_from_rosters(*rosters, _RANK)

    pairs = [(_timed(plan_ours), _timed(plan_theirs)) for _ in range(repeats)]
    seconds, megatron_seconds = (min(run[0] for run in runs) for runs in zip(*pairs, strict=True))
    plan, theirs = pairs[0][0][1], pairs[0][1][1]
    shapes = {meta.name: meta.shape for meta in gathered[_RANK][1]}
    sizes = [(op.peer_rank, 2 * _volume(op.my_slice, shapes[op.param_name])) for op in theirs.recv_ops]
    return Comparison(
        name=name,
        version=megatron.core.__version__,
        seconds=seconds,
        megatron_seconds=megatron_seconds,
        speedup=megatron_seconds / seconds,
        received_bytes=int(plan.moves.num_bytes.sum()),
        megatron_received_bytes=sum(size for _, size in sizes),
        wire_bytes=plan.wire_bytes,
        megatron_wire_bytes=sum(size for peer, size in sizes if peer != _RANK),
    )


def show(result: Comparison) -> None:
    """Print a comparison as a table."""
    title = f"{result.name}: plan of one rank, {result.speedup:.1f} times faster"
    table = Table("planner", "seconds", "receives", "of it from other ranks", title=title, title_justify="left")
    ours = ("hybridrl", result.seconds, result.received_bytes, result.wire_bytes)
    theirs = (
        f"megatron-core {result.version}",
        result.megatron_seconds,
        result.megatron_received_bytes,
        result.megatron_wire_bytes,
    )
    for planner, seconds, received, wire in (ours, theirs):
        table.add_row(planner, f"{seconds:.3f}", f"{received / 1e9:.2f} GB", f"{wire / 1e9:.2f} GB")
    Console().print(table)


def _timed(run: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def _volume(slices: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    return math.prod(len(range(*part.indices(extent))) for part, extent in zip(slices, shape, strict=True))


def _roster(layout: MegatronLayout) -> list[list[Any]]:
    """Return the metadata of every tensor of every rank."""
    groups = _Groups(layout)
    maps = megatron_world(layout, Devices(8))
    return [
        [groups.metadata(rank, tensor) for tensor in shard_map.tensors.values()] for rank, shard_map in enumerate(maps)
    ]


class _Groups:
    """Ranks of each parallel group, and the metadata that follows from them; equal groups share one list."""

    def __init__(self, layout: MegatronLayout) -> None:
        self._layout = layout
        self._at = [layout.sizes.coordinates(rank) for rank in range(layout.sizes.world_size)]
        self._known: dict[tuple[object, ...], list[int]] = {}

    def metadata(self, rank: int, tensor: LocalTensor) -> Any:
        """Return the metadata of one tensor; global layer and expert numbers are in its resolved name."""
        import torch
        from megatron.core.resharding.utils import ParameterMetadata, assign_resolved_name_inplace

        name, is_expert = tensor.name.partition(".")[2], ".experts." in tensor.name
        stem = name.rstrip("0123456789")
        is_dense_tp = not is_expert and stem.endswith(_ROWS_ACROSS_TP + _COLUMNS_ACROSS_TP)
        tp_ranks = self._ranks(rank, "etp") if is_expert else self._ranks(rank, "tp")
        metadata = ParameterMetadata(
            name=name,
            shape=tensor.shape,
            dtype=torch.bfloat16,
            element_size=2,
            is_tp=len(tp_ranks) > 1 if is_expert else is_dense_tp,
            partition_dim=int(stem.endswith(_COLUMNS_ACROSS_TP)),
            partition_stride=2 if not is_expert and stem.endswith("linear_fc1.weight") else 1,
            is_ep=is_expert,
            num_experts=self._num_experts() if is_expert else None,
            owner_rank=rank,
            tensor_parallel_group_ranks=tp_ranks,
            expert_parallel_group_ranks=self._ranks(rank, "ep") if is_expert else None,
            data_parallel_group_ranks=self._ranks(rank, "dp"),
            pipeline_parallel_group_ranks=self._ranks(rank, "pp"),
        )
        (chunk,) = self._layout.chunks(self._at[rank].pp)
        prefixes = {f"decoder.layers.{i}": f"decoder.layers.{layer}" for i, layer in enumerate(chunk.layers)}
        assign_resolved_name_inplace(metadata, layer_module_prefix_map=prefixes, base_name=name)
        return metadata

    def _num_experts(self) -> int:
        return max(getattr(layer.mlp, "num_experts", 0) for layer in self._layout.spec.layers)

    def _ranks(self, rank: int, along: str) -> list[int]:
        """Return the ranks that differ from `rank` in one coordinate of its grid only."""
        grid = ("etp", "ep", "edp", "pp") if along in ("etp", "ep") else ("tp", "cp", "dp", "pp")
        fixed = tuple(axis for axis in grid if axis != along)
        key = (along, *(getattr(self._at[rank], axis) for axis in fixed))
        if key not in self._known:
            self._known[key] = [
                other for other, at in enumerate(self._at) if (along, *(getattr(at, axis) for axis in fixed)) == key
            ]
        return self._known[key]
