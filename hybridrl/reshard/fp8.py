"""Float8 weights: the same shards in blocks of 128 x 128, each with its scale, and the sources that make them.

A float8 checkpoint holds, beside each quantised weight of shape [N, K], ``weight_scale_inv`` of shape [N / 128, K / 128], rounded up:
one float32 per block. Where a destination keeps a weight so, its sources quantise before they send: a byte per element and
the scales travel, instead of two bytes per element, and each block is quantised once however many destinations want it.
To the planner, the transports and the checksums, the float8 weight and its scales are two tensors like any other.

A rank can quantise its shards alone only if no block is cut, so :func:`quantized` refuses a cut before anything is planned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch

from hybridrl.errors import ReshardError
from hybridrl.layout.box import Box, DType, contiguous_strides
from hybridrl.layout.builder import ShardMapBuilder
from hybridrl.layout.shard import CanonicalTensor, LocalTensor, Shard, ShardMap
from hybridrl.reshard import ops
from hybridrl.reshard.plan import Plan

BLOCK = 128
SUFFIX = "_scale_inv"


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight, or of a stack of them. Example: (256, 300) -> (2, 3)."""
    *stack, rows, columns = shape
    return (*stack, -(-rows // BLOCK), -(-columns // BLOCK))


def scale_box(tensor: str, shape: Sequence[int], box: Box) -> Box:
    """Return which scales belong to a box of a weight.

    Worked example: rows 128:256 of a (512, 300) weight have the scales [1:2, 0:3].

    Raises:
        ReshardError: When a boundary of the box cuts a block; names the tensor, the boundary and the degrees that would not.
    """
    for dim, (start, stop, size) in enumerate(zip(box.start, box.stop, shape, strict=True)):
        for edge in (start, stop):
            if edge % BLOCK and edge != size:
                raise ReshardError(
                    f"{tensor} {box} of {tuple(shape)}: {'columns' if dim else 'rows'} are cut at {edge}, inside a float8 block of "
                    f"{BLOCK} x {BLOCK}; {_whole_degrees(size)}"
                )
    return Box(tuple(start // BLOCK for start in box.start), tuple(-(-stop // BLOCK) for stop in box.stop))


def _whole_degrees(size: int) -> str:
    degrees = [degree for degree in range(1, size // BLOCK + 1) if size % (degree * BLOCK) == 0]
    if not degrees:
        return f"no even cut of {size} leaves blocks whole, so keep this dimension on one rank"
    return f"a tensor-parallel degree of {', '.join(map(str, degrees))} cuts no block"


def float8_tensors(destinations: Sequence[ShardMap]) -> set[str]:
    """Return the canonical weights that a destination keeps in float8."""
    return {
        shard.tensor
        for shard_map in destinations
        for shard in shard_map.shards
        if shard_map.tensors[shard.local].dtype is DType.FLOAT8_E4M3
    }


def quantized(shard_map: ShardMap, weights: Collection[str]) -> ShardMap:
    """Return the map of the same rank with some canonical weights in float8.

    A local tensor of theirs keeps its name and shape; its scales are a local tensor ``<name>_scale_inv``, which for fused weights is
    that of vLLM. Worked example: rows 256:512 of ``up_proj`` at rows 256:512 of a fused (512, 384) ``gate_up_proj.weight`` have
    the scales [2:4, 0:3] at rows 2:4 of the (4, 3) ``gate_up_proj.weight_scale_inv``.

    Args:
        shard_map: In bfloat16.
        weights: Canonical names, of two dimensions each.

    Raises:
        ReshardError: When a block is cut, or the local tensor is not bfloat16 or interleaves the rows of a block; names the tensor.
    """
    scales = {f"{name}{SUFFIX}": scale_shape(tensor.shape) for name, tensor in _picked(shard_map, weights)}
    canonical = {name: CanonicalTensor(name, shape) for name, shape in scales.items()}
    builder = ShardMapBuilder(shard_map.place, {**shard_map.canonical, **canonical})
    in_blocks = {shard.local for shard in shard_map.shards if shard.tensor in weights}
    for local in shard_map.tensors.values():
        dtype = DType.FLOAT8_E4M3 if local.name in in_blocks else local.dtype
        builder.local(local.name, local.shape, dtype, num_padding=shard_map.padding.get(local.name, 0))
        if local.name in in_blocks:
            builder.local(f"{local.name}{SUFFIX}", scale_shape(local.shape), DType.FLOAT32)
    for shard in shard_map.shards:
        builder.place_view(shard.tensor, shard.box, shard.local, shard.offset, shard.strides)
        if shard.local in in_blocks:
            _place_scales(builder, shard, shard_map.tensors[shard.local], shard_map, weights)
    return builder.build()


def _picked(shard_map: ShardMap, weights: Collection[str]) -> Iterator[tuple[str, CanonicalTensor]]:
    return ((name, tensor) for name, tensor in shard_map.canonical.items() if name in weights)


def _place_scales(
    builder: ShardMapBuilder, shard: Shard, local: LocalTensor, shard_map: ShardMap, weights: Collection[str]
) -> None:
    shape = shard_map.canonical[shard.tensor].shape
    if shard.tensor not in weights:
        raise ReshardError(f"{shard.tensor}: shares {local.name} with float8 weights, but is none itself")
    if local.dtype is not DType.BFLOAT16:
        raise ReshardError(
            f"{shard.tensor}: {local.name} is {local.dtype.value}, but float8 blocks are made of bfloat16"
        )
    at = np.unravel_index(shard.offset, local.shape)
    *stack, row, column = (int(index) for index in at)
    if shard.strides[-2:] != contiguous_strides(local.shape)[-2:] or row % BLOCK or column % BLOCK:
        raise ReshardError(
            f"{shard.tensor} {shard.box}: lies at {tuple(map(int, at))} of {local.name} {local.shape} with strides {shard.strides}, "
            f"not in whole blocks of {BLOCK} x {BLOCK}"
        )
    strides = contiguous_strides(scale_shape(local.shape))
    place = (*stack, row // BLOCK, column // BLOCK)
    offset = sum(index * stride for index, stride in zip(place, strides, strict=True))
    box = scale_box(shard.tensor, shape, shard.box)
    builder.place_view(f"{shard.tensor}{SUFFIX}", box, f"{local.name}{SUFFIX}", offset, strides[-2:])


class BlockQuantizer:
    """Makes the float8 weights that one source serves, in memory of its own, before each transfer.

    Args:
        plan: From the :func:`quantized` maps of the sources.
        source: Index into `plan.sources`.
        shard_map: The quantised map of this source.
    """

    def __init__(self, plan: Plan, source: int, shard_map: ShardMap) -> None:
        served = plan.moves.take(plan.moves.source == source).canonical()
        shapes = {name: tensor.shape for name, tensor in shard_map.canonical.items()}
        scales = {(shard.tensor, shard.box): shard for shard in shard_map.shards if shard.local.endswith(SUFFIX)}
        weights = [
            (shard, scales[shard.tensor + SUFFIX, scale_box(shard.tensor, shapes[shard.tensor], shard.box)])
            for shard in shard_map.shards
            if shard.tensor in served and shard_map.tensors[shard.local].dtype is DType.FLOAT8_E4M3
        ]
        self._locals = [shard_map.tensors[name] for name in dict.fromkeys(shard.local for shard, _ in weights)]
        buffers = {local.name: index for index, local in enumerate(self._locals)}
        rows = [_segment(buffers[shard.local], shard, scale) for shard, scale in weights]
        self._segments = np.array(rows, dtype=np.int64).reshape(-1, 11)
        self._made: dict[str, torch.Tensor] = {}

    def run(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Quantise and return the tensors of the quantised map that this source sends.

        Args:
            tensors: Local name -> contiguous bfloat16 tensor, as trained.

        Raises:
            ReshardError: When a weight holds a NaN or an infinity.
        """
        live = [tensors[local.name] for local in self._locals]
        if not live:
            return dict(tensors)
        device = live[0].device
        if not self._made:
            for local in self._locals:
                self._made[local.name] = torch.empty(local.shape, dtype=torch.float8_e4m3fn, device=device)
                self._made[local.name + SUFFIX] = torch.empty(scale_shape(local.shape), device=device)
        ops.block_quantize(
            self._segments,
            ops.buffer_table(live),
            ops.buffer_table([self._made[local.name] for local in self._locals]),
            ops.buffer_table([self._made[local.name + SUFFIX] for local in self._locals]),
            num_threads=torch.get_num_threads(),
            cuda_stream=torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None,
        )
        return {**tensors, **self._made}


def _segment(buffer: int, weight: Shard, scale: Shard) -> tuple[int, ...]:
    bf16, f8, f32 = (dtype.itemsize for dtype in (DType.BFLOAT16, DType.FLOAT8_E4M3, DType.FLOAT32))
    pitch, rows, columns = weight.strides[0], *weight.box.shape
    return (
        (buffer, weight.offset * bf16, pitch * bf16)
        + (buffer, weight.offset * f8, pitch * f8)
        + (buffer, scale.offset * f32, scale.strides[0] * f32)
        + (rows, columns)
    )
