"""Turns moves into the kernels' tables: rows of equal length at a constant pitch on both sides.

Worked example: a move of box (16, 4) float32 from columns 4:8 of a local (16, 8) tensor into a packed message is one segment of
16 rows of 16 bytes: source offset 16 bytes and pitch 32 bytes, destination pitch 16 bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrl.errors import ReshardError
from hybridrl.layout.box import DType, contiguous_strides
from hybridrl.layout.shard import CanonicalTensor
from hybridrl.reshard.ops import Cast, tensor_seed
from hybridrl.reshard.plan import Move, Region

Table = NDArray[np.int64]

_CASTS = {(DType.FLOAT32, DType.BFLOAT16): Cast.F32_TO_BF16, (DType.BFLOAT16, DType.FLOAT32): Cast.BF16_TO_F32}


@dataclass(frozen=True, slots=True)
class Copy:
    """One box from a region of a source buffer to a region of a destination buffer; offsets and strides in elements."""

    shape: tuple[int, ...]
    source: int
    read: Region
    destination: int
    write: Region


def cast_between(source: DType, destination: DType, tensor: str) -> Cast:
    """Return the kernel's cast for a pair of element types.

    Raises:
        ReshardError: When the kernels cannot convert; names the tensor and both types.
    """
    if source is destination:
        return Cast.NONE
    if (source, destination) not in _CASTS:
        raise ReshardError(
            f"{tensor}: cannot convert {source.value} to {destination.value}; keep both sides in one type"
        )
    return _CASTS[source, destination]


def copy_tables(copies: Iterable[tuple[str, Copy]]) -> list[tuple[Cast, Table]]:
    """Compile named copies into one [num_segments, 8] table per cast."""
    rows: dict[Cast, list[tuple[int, ...]]] = {}
    for tensor, copy in copies:
        read, write = copy.read, copy.write
        out = rows.setdefault(cast_between(read.dtype, write.dtype, tensor), [])
        r, w = read.dtype.itemsize, write.dtype.itemsize
        for run in _runs(copy.shape, read.strides, write.strides):
            out.append(
                (copy.source, (read.offset + run.a_offset) * r, run.a_pitch * r)
                + (copy.destination, (write.offset + run.b_offset) * w, run.b_pitch * w)
                + (run.rows, run.row_elements * r)
            )
    return [(cast, np.array(table, dtype=np.int64).reshape(-1, 8)) for cast, table in rows.items()]


@dataclass(frozen=True, slots=True)
class ChecksumTable:
    """Input of the checksum kernel for regions of one element type.

    Attributes:
        table: [num_segments, 9] int64.
        cast: Conversion before the bits are taken.
    """

    table: Table
    itemsize: int
    cast: Cast


def checksum_tables(
    moves: Sequence[Move],
    buffers: Mapping[str, int],
    slots: Mapping[str, int],
    canonical: Mapping[str, CanonicalTensor],
    *,
    is_source: bool,
) -> list[ChecksumTable]:
    """Compile the checksum of one side of `moves`, summed into one slot per canonical tensor."""
    rows: dict[tuple[int, Cast], list[tuple[int, ...]]] = {}
    for move in moves:
        region = move.read if is_source else move.write
        strides = contiguous_strides(canonical[move.tensor].shape)
        first = sum(start * stride for start, stride in zip(move.box.start, strides, strict=True))
        seed = tensor_seed(move.tensor)
        cast = cast_between(region.dtype, move.wire_dtype, move.tensor)
        out = rows.setdefault((region.dtype.itemsize, cast), [])
        item = region.dtype.itemsize
        for run in _runs(move.box.shape, region.strides, strides):
            out.append(
                (buffers[region.local], (region.offset + run.a_offset) * item, run.a_pitch * item)
                + (run.rows, run.row_elements, first + run.b_offset, run.b_pitch, seed, slots[move.tensor])
            )
    return [ChecksumTable(np.array(t, dtype=np.int64).reshape(-1, 9), i, c) for (i, c), t in rows.items()]


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows of consecutive elements in two layouts; offsets and pitches in elements."""

    a_offset: int
    a_pitch: int
    b_offset: int
    b_pitch: int
    rows: int
    row_elements: int


def _runs(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> Iterator[_Run]:
    """Cut a box into the longest runs that are consecutive in both layouts."""
    dims = _merged([d for d in zip(shape, a, b, strict=True) if d[0] != 1])
    elements = dims.pop()[0] if dims and dims[-1][1:] == (1, 1) else 1
    rows, a_pitch, b_pitch = dims.pop() if dims else (1, elements, elements)
    for index in itertools.product(*(range(extent) for extent, _, _ in dims)):
        a_offset = sum(i * d[1] for i, d in zip(index, dims, strict=True))
        b_offset = sum(i * d[2] for i, d in zip(index, dims, strict=True))
        yield _Run(a_offset, a_pitch, b_offset, b_pitch, rows, elements)


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbouring dimensions that step as one in both layouts."""
    out: list[tuple[int, int, int]] = []
    for extent, a, b in dims:
        if out and out[-1][1] == extent * a and out[-1][2] == extent * b:
            out[-1] = (out[-1][0] * extent, a, b)
        else:
            out.append((extent, a, b))
    return out
