"""Turns moves into the kernels' tables: rows of equal length at a constant pitch on both sides.

Worked example: a move of box (16, 4) float32 from columns 4:8 of a local (16, 8) tensor into a packed message is one segment of
16 rows of 16 bytes: source offset 16 bytes and pitch 32 bytes, destination pitch 16 bytes. Its canonical indices begin at 4 and
step by the 8 columns of the canonical tensor, of which the checksum takes note.
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


@dataclass(frozen=True, slots=True)
class Piece:
    """Whose elements a copy moves: a box of a canonical tensor, summed into one slot."""

    tensor: CanonicalTensor
    start: tuple[int, ...]
    slot: int

    @classmethod
    def of(cls, move: Move, canonical: Mapping[str, CanonicalTensor], slots: Mapping[str, int]) -> Piece:
        """Return the piece that a move carries."""
        return cls(canonical[move.tensor], move.box.start, slots[move.tensor])

    @property
    def strides(self) -> tuple[int, ...]:
        """Canonical index per step of each dimension."""
        return contiguous_strides(self.tensor.shape)

    def columns(self, index_offset: int, index_pitch: int) -> tuple[int, int, int, int]:
        """Return index_start, index_pitch, seed and slot of a run."""
        first = sum(start * stride for start, stride in zip(self.start, self.strides, strict=True))
        return first + index_offset, index_pitch, tensor_seed(self.tensor.name), self.slot


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
        out = rows.setdefault(cast_between(copy.read.dtype, copy.write.dtype, tensor), [])
        out += [_copy_columns(copy, run) for run in _runs(copy.shape, copy.read.strides, copy.write.strides)]
    return [(cast, np.array(table, dtype=np.int64).reshape(-1, 8)) for cast, table in rows.items()]


def verified_tables(copies: Iterable[tuple[Piece, Copy]]) -> list[tuple[int, Table]]:
    """Compile copies without a cast into one [num_segments, 12] table per element size."""
    rows: dict[int, list[tuple[int, ...]]] = {}
    for piece, copy in copies:
        assert copy.read.dtype is copy.write.dtype, copy
        out = rows.setdefault(copy.read.dtype.itemsize, [])
        for run in _runs(copy.shape, copy.read.strides, copy.write.strides, piece.strides):
            out.append(_copy_columns(copy, run) + piece.columns(run.offsets[2], run.pitches[2]))
    return [(itemsize, np.array(table, dtype=np.int64).reshape(-1, 12)) for itemsize, table in rows.items()]


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
        piece = Piece.of(move, canonical, slots)
        cast = cast_between(region.dtype, move.wire_dtype, move.tensor)
        item = region.dtype.itemsize
        out = rows.setdefault((item, cast), [])
        for run in _runs(move.box.shape, region.strides, piece.strides):
            out.append(
                (buffers[region.local], (region.offset + run.offsets[0]) * item, run.pitches[0] * item)
                + (run.rows, run.row_elements, *piece.columns(run.offsets[1], run.pitches[1]))
            )
    return [ChecksumTable(np.array(t, dtype=np.int64).reshape(-1, 9), i, c) for (i, c), t in rows.items()]


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows of consecutive elements in several layouts; offsets and pitches in elements, one per layout."""

    offsets: tuple[int, ...]
    pitches: tuple[int, ...]
    rows: int
    row_elements: int


def _copy_columns(copy: Copy, run: _Run) -> tuple[int, ...]:
    r, w = copy.read.dtype.itemsize, copy.write.dtype.itemsize
    return (
        (copy.source, (copy.read.offset + run.offsets[0]) * r, run.pitches[0] * r)
        + (copy.destination, (copy.write.offset + run.offsets[1]) * w, run.pitches[1] * w)
        + (run.rows, run.row_elements * r)
    )


def _runs(shape: tuple[int, ...], *layouts: tuple[int, ...]) -> Iterator[_Run]:
    """Cut a box into the longest runs that are consecutive in all layouts, given by their strides."""
    dims = _merged([d for d in zip(shape, *layouts, strict=True) if d[0] != 1])
    is_dense = bool(dims) and all(stride == 1 for stride in dims[-1][1:])
    elements = dims.pop()[0] if is_dense else 1
    rows, *pitches = dims.pop() if dims else (1, *(elements for _ in layouts))
    for index in itertools.product(*(range(dim[0]) for dim in dims)):
        offsets = tuple(sum(i * dim[1 + k] for i, dim in zip(index, dims, strict=True)) for k in range(len(layouts)))
        yield _Run(offsets, tuple(pitches), rows, elements)


def _merged(dims: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Join neighbouring dimensions that step as one in all layouts."""
    out: list[tuple[int, ...]] = []
    for extent, *strides in dims:
        if out and all(outer == extent * inner for outer, inner in zip(out[-1][1:], strides, strict=True)):
            out[-1] = (out[-1][0] * extent, *strides)
        else:
            out.append((extent, *strides))
    return out
