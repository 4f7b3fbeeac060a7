"""Flat ranges of local tensors, in canonical boxes: what a distributed optimizer holds of each parameter.

A distributed optimizer lays the parameters of a rank one behind the other and cuts them into one contiguous range per
data-parallel rank, wherever the cuts fall. Its main parameter and moments are therefore flat ranges of a local tensor, and a
range of a strided view is a few boxes: the end of a row, whole rows, the beginning of a row; in each dimension likewise.

Worked example: a local (4, 8) tensor is rows 0:4 of a canonical one. Its elements 10..27 are the boxes [1:2, 2:8], [2:3, 0:8]
and [3:4, 0:4], which lie at 0, 6 and 14 of the range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hybridrl.layout.box import Box, DType
from hybridrl.layout.shard import LocalTensor, Shard, ShardMap


def flat_shard_map(shard_map: ShardMap, ranges: Mapping[str, range], dtype: DType) -> ShardMap:
    """Return the map of a place that holds flat ranges of local tensors, each as a tensor of one dimension.

    Args:
        ranges: Local name -> elements of the row-major tensor that are held; other tensors are not held.
        dtype: Of the ranges, whatever the tensors have.
    """
    tensors = {name: LocalTensor(name, (len(held),), dtype) for name, held in ranges.items()}
    shards = tuple(
        part for shard in shard_map.shards if shard.local in ranges for part in _held(shard, ranges[shard.local])
    )
    canonical = {shard.tensor: shard_map.canonical[shard.tensor] for shard in shards}
    covered = dict.fromkeys(tensors, 0)
    for shard in shards:
        covered[shard.local] += shard.box.num_elements
    padding = {name: len(held) - covered[name] for name, held in ranges.items() if len(held) > covered[name]}
    return ShardMap(shard_map.place, tensors, shards, canonical, padding)


def _held(shard: Shard, held: range) -> Iterator[Shard]:
    """Yield the parts of a shard that lie in a range, with offsets from the range's first element."""
    dims = sorted((d for d, extent in enumerate(shard.box.shape) if extent > 1), key=lambda d: -shard.strides[d])
    for box in _boxes(shard, shard.box, held, tuple(dims)):
        yield replace(shard, box=box, offset=shard.offset_of(box) - held.start)


def _boxes(shard: Shard, box: Box, held: range, dims: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes inside `box` that lie in a range, cutting `dims`, widest stride first."""
    first = shard.offset_of(box)
    span = 1 + sum((box.shape[d] - 1) * shard.strides[d] for d in dims)
    if held.start <= first and first + span <= held.stop:
        yield box
    elif dims and first < held.stop and held.start < first + span:
        outer, inner = dims[0], dims[1:]
        stride, extent = shard.strides[outer], box.shape[outer]
        row_span = span - (extent - 1) * stride
        touched = _touched(range(extent), first, stride, row_span, held)
        begin = min(max(-((first - held.start) // stride), touched.start), touched.stop)
        end = min(max((held.stop - first - row_span) // stride + 1, begin), touched.stop)
        if begin < end:
            yield _rows(box, outer, begin, end)
        for row in (*range(touched.start, begin), *range(end, touched.stop)):
            yield from _boxes(shard, _rows(box, outer, row, row + 1), held, inner)


def _touched(rows: range, first: int, stride: int, span: int, held: range) -> range:
    """Return the rows, `stride` apart and each spanning `span` elements, that reach into a range."""
    begin = (held.start - first - span) // stride + 1
    end = -((first - held.stop) // stride)
    return rows[max(begin, 0) : max(end, 0)]


def _rows(box: Box, dim: int, begin: int, end: int) -> Box:
    """Return the part of a box between two indices of one dimension, counted from its start."""
    start, stop = list(box.start), list(box.stop)
    start[dim], stop[dim] = box.start[dim] + begin, box.start[dim] + end
    return Box(tuple(start), tuple(stop))
