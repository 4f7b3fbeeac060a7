"""Many moves as columns: small to send, quick to build and to price; a :class:`Move` is made when one is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import overload

import numpy as np
from numpy.typing import NDArray

from hybridrl.layout.box import Box, DType
from hybridrl.layout.shard import CanonicalTensor
from hybridrl.reshard.boxes import Boxes, IntArray
from hybridrl.reshard.table import DTYPES, itemsizes


@dataclass(frozen=True, slots=True)
class Region:
    """A strided view of a local tensor: element offset, and element stride per canonical dimension."""

    local: str
    offset: int
    strides: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Move:
    """One box that goes from one source to one destination.

    Attributes:
        source: Index into the plan's sources.
        destination: Index into the plan's destinations.
        chunk: Index into the destination's chunks.
        is_wire: Whether the bytes leave the memory of a device.
    """

    tensor: str
    box: Box
    source: int
    destination: int
    read: Region
    write: Region
    chunk: int
    is_wire: bool

    @property
    def wire_dtype(self) -> DType:
        """Element type that travels: the narrower of the two sides."""
        return min(self.read.dtype, self.write.dtype, key=lambda dtype: dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        """Payload bytes of this move."""
        return self.box.num_elements * self.wire_dtype.itemsize


@dataclass(frozen=True, eq=False)
class RegionTable:
    """Regions as columns.

    Attributes:
        names: `local` indexes it.
        local: [n] int64.
        offset: [n] int64.
        strides: [n, num_dims] int64.
        dtype: [n] int64, index into ``table.DTYPES``.
    """

    names: tuple[str, ...]
    local: IntArray
    offset: IntArray
    strides: IntArray
    dtype: IntArray

    @classmethod
    def concatenate(cls, parts: Sequence[RegionTable]) -> RegionTable:
        """Return the regions of all parts, in order."""
        first = np.cumsum([0, *(len(part.names) for part in parts)])
        return cls(
            tuple(chain.from_iterable(part.names for part in parts)),
            np.concatenate([part.local + at for part, at in zip(parts, first[:-1], strict=True)]),
            *(np.concatenate([getattr(part, name) for part in parts]) for name in ("offset", "strides", "dtype")),
        )


@dataclass(frozen=True, eq=False)
class MoveTable(Sequence[Move]):
    """A sequence of moves.

    Attributes:
        names: Canonical names; `boxes.tensor` indexes it.
        shapes: [num_names, num_dims] int64, of the canonical tensors, padded with 1.
        ndims: [num_names] int64.
        source: [n] int64; `destination` and `chunk` likewise.
        is_wire: [n] bool.
        num_bytes: [n] int64, payload of each move.
    """

    names: tuple[str, ...]
    shapes: IntArray
    ndims: IntArray
    boxes: Boxes
    source: IntArray
    destination: IntArray
    chunk: IntArray
    is_wire: NDArray[np.bool_]
    read: RegionTable
    write: RegionTable
    num_bytes: IntArray = field(init=False)

    def __post_init__(self) -> None:
        item = np.minimum(itemsizes(self.read.dtype), itemsizes(self.write.dtype))
        object.__setattr__(self, "num_bytes", self.boxes.volumes() * item)

    def __len__(self) -> int:
        return len(self.source)

    @overload
    def __getitem__(self, index: int) -> Move: ...

    @overload
    def __getitem__(self, index: slice) -> MoveTable: ...

    def __getitem__(self, index: int | slice) -> Move | MoveTable:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        rows = np.arange(len(self))[index : index + 1 or None]
        if not len(rows):
            raise IndexError(index)
        return next(iter(self.take(rows)))

    def __iter__(self) -> Iterator[Move]:
        ndims = self.ndims[self.boxes.tensor].tolist()
        columns = zip(
            self.boxes.tensor.tolist(),
            self.boxes.boxes(),
            self.source.tolist(),
            self.destination.tolist(),
            _regions(self.read, ndims),
            _regions(self.write, ndims),
            self.chunk.tolist(),
            self.is_wire.tolist(),
            ndims,
            strict=True,
        )
        for tensor, box, source, destination, read, write, chunk, is_wire, ndim in columns:
            own = box if len(box.start) == ndim else Box(box.start[:ndim], box.stop[:ndim])
            yield Move(self.names[tensor], own, source, destination, read, write, chunk, is_wire)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def canonical(self) -> dict[str, CanonicalTensor]:
        """Return the tensors that move."""
        used = np.unique(self.boxes.tensor).tolist()
        shapes, ndims = self.shapes.tolist(), self.ndims.tolist()
        return {self.names[i]: CanonicalTensor(self.names[i], tuple(shapes[i][: ndims[i]])) for i in used}

    @classmethod
    def concatenate(cls, parts: Sequence[MoveTable]) -> MoveTable:
        """Return the moves of all parts, in order; they speak of the same canonical tensors."""
        names = ("source", "destination", "chunk", "is_wire")
        source, destination, chunk, is_wire = (
            np.concatenate([getattr(part, name) for part in parts]) for name in names
        )
        return cls(
            parts[0].names,
            parts[0].shapes,
            parts[0].ndims,
            Boxes.concatenate([part.boxes for part in parts]),
            source,
            destination,
            chunk,
            is_wire,
            RegionTable.concatenate([part.read for part in parts]),
            RegionTable.concatenate([part.write for part in parts]),
        )

    def take(self, rows: IntArray | NDArray[np.bool_]) -> MoveTable:
        """Return the moves of some rows, in that order."""
        read, write = (
            RegionTable(r.names, r.local[rows], r.offset[rows], r.strides[rows], r.dtype[rows])
            for r in (self.read, self.write)
        )
        picked = (self.source[rows], self.destination[rows], self.chunk[rows], self.is_wire[rows])
        return MoveTable(self.names, self.shapes, self.ndims, self.boxes[rows], *picked, read, write)


def trim(*tables: MoveTable) -> tuple[MoveTable, ...]:
    """Return the same moves without the names of tensors that none of them moves; the tables go on sharing their names."""
    used, tensor = np.unique(np.concatenate([table.boxes.tensor for table in tables]), return_inverse=True)
    first = tables[0]
    names = tuple(first.names[index] for index in used.tolist())
    cuts = np.split(tensor.reshape(-1), np.cumsum([len(table) for table in tables])[:-1])
    return tuple(
        replace(
            table,
            names=names,
            shapes=first.shapes[used],
            ndims=first.ndims[used],
            boxes=replace(table.boxes, tensor=own),
        )
        for table, own in zip(tables, cuts, strict=True)
    )


def _regions(table: RegionTable, ndims: list[int]) -> Iterator[Region]:
    columns = zip(
        table.local.tolist(), table.offset.tolist(), table.strides.tolist(), table.dtype.tolist(), ndims, strict=True
    )
    for local, offset, strides, dtype, ndim in columns:
        yield Region(table.names[local], offset, tuple(strides[:ndim]), DTYPES[dtype])
