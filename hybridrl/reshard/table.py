"""Shard maps as columns: what the planner computes with.

A map of a large model has tens of thousands of shards, a world hundreds of maps. As arrays they are small to send, quick to
intersect, and equal ones (replicas) are recognised by a digest, so that the planner looks at each only once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hybridrl.layout.box import DType
from hybridrl.layout.shard import LocalTensor, Place, ShardMap

IntArray = NDArray[np.int64]

DTYPES = tuple(DType)
_ITEMSIZES = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class ShardTable:
    """A shard map as columns, one row per shard; missing dimensions are padded with the range 0:1 and stride 0.

    Attributes:
        names: Canonical tensors that the shards name; `tensor` indexes it.
        shapes: [num_tensors, num_dims] int64, padded with 1.
        ndims: [num_tensors] int64.
        locals: Names of the local tensors in map order; `local` indexes it.
        dtype: [num_locals] int64, element type as an index into :data:`DTYPES`.
        tensor: [num_shards] int64.
        start: [num_shards, num_dims] int64, first canonical index; `stop` likewise.
        local: [num_shards] int64.
        offset: [num_shards] int64, in elements.
        strides: [num_shards, num_dims] int64, in elements.
        digest: Equal for maps that differ only in their place.
    """

    place: Place
    names: tuple[str, ...]
    shapes: IntArray
    ndims: IntArray
    locals: tuple[str, ...]
    dtype: IntArray
    tensor: IntArray
    start: IntArray
    stop: IntArray
    local: IntArray
    offset: IntArray
    strides: IntArray
    digest: bytes

    @classmethod
    def of(cls, shard_map: ShardMap) -> ShardTable:
        """Turn a shard map into columns."""
        shards = shard_map.shards
        tensors: dict[str, int] = {}
        locals_ = {name: index for index, name in enumerate(shard_map.tensors)}
        tensor = np.array([tensors.setdefault(s.tensor, len(tensors)) for s in shards], dtype=np.int64)
        local = np.array([locals_[s.local] for s in shards], dtype=np.int64)
        shapes = [shard_map.canonical[name].shape for name in tensors]
        ndims = np.array(list(map(len, shapes)), dtype=np.int64)
        num_dims = int(ndims.max(initial=1))
        columns = (
            tensor,
            _padded([s.box.start for s in shards], num_dims, 0),
            _padded([s.box.stop for s in shards], num_dims, 1),
            local,
            np.array([s.offset for s in shards], dtype=np.int64),
            _padded([s.strides for s in shards], num_dims, 0),
        )
        described = (_padded(shapes, num_dims, 1), ndims)
        kept = tuple(shard_map.tensors.values())
        dtype = np.array([DTYPES.index(tensor.dtype) for tensor in kept], dtype=np.int64)
        digest = _digest(tuple(tensors), kept, (*described, *columns))
        return cls(shard_map.place, tuple(tensors), *described, tuple(locals_), dtype, *columns, digest)

    @property
    def num_dims(self) -> int:
        """Number of columns of `start`, `stop` and `strides`."""
        return int(self.start.shape[1])

    def widened(self, num_dims: int) -> ShardTable:
        """Return the table with at least `num_dims` dimensions."""
        extra = ((0, 0), (0, num_dims - self.num_dims))
        if num_dims <= self.num_dims:
            return self
        return replace(
            self,
            shapes=np.pad(self.shapes, extra, constant_values=1),
            start=np.pad(self.start, extra),
            stop=np.pad(self.stop, extra, constant_values=1),
            strides=np.pad(self.strides, extra),
        )


def shard_tables(maps: Iterable[ShardMap | ShardTable]) -> list[ShardTable]:
    """Turn maps into tables, each set of shards once: replicas declared together share theirs."""
    known: dict[tuple[int, int], ShardTable] = {}
    kept: list[ShardMap] = []
    tables = []
    for item in maps:
        if isinstance(item, ShardMap):
            key = (id(item.shards), id(item.tensors))
            if key not in known:
                known[key] = ShardTable.of(item)
                kept.append(item)
            tables.append(replace(known[key], place=item.place))
        else:
            tables.append(item)
    return tables


def itemsizes(dtype_codes: IntArray) -> IntArray:
    """Return the bytes per element of indices into :data:`DTYPES`."""
    sizes: IntArray = _ITEMSIZES[dtype_codes]
    return sizes


def _padded(rows: Sequence[tuple[int, ...]], num_dims: int, fill: int) -> IntArray:
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    out = np.full((len(rows), num_dims), fill, dtype=np.int64)
    out[np.arange(num_dims) < lengths[:, None]] = np.fromiter(
        chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum())
    )
    return out


def _digest(names: tuple[str, ...], locals_: tuple[LocalTensor, ...], columns: tuple[IntArray, ...]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update("\n".join(names).encode())
    digest.update("\n".join(f"{t.name} {t.shape} {t.dtype.value}" for t in locals_).encode())
    for column in columns:
        digest.update(np.ascontiguousarray(column).data)
    return digest.digest()
