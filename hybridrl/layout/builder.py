"""Collects the local tensors and shards of one rank, in model order, into a proved :class:`ShardMap`."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hybridrl.errors import LayoutError
from hybridrl.layout.box import Box, DType, contiguous_strides
from hybridrl.layout.shard import CanonicalTensor, LocalTensor, Place, Shard, ShardMap


class ShardMapBuilder:
    """Builds the map of one rank.

    Args:
        place: Whose memory the map describes.
        canonical: Every tensor of the checkpoint.
    """

    def __init__(self, place: Place, canonical: dict[str, CanonicalTensor]) -> None:
        self._place = place
        self._canonical = canonical
        self._tensors: dict[str, LocalTensor] = {}
        self._shards: list[Shard] = []
        self._padding: dict[str, int] = {}

    def local(self, name: str, shape: tuple[int, ...], dtype: DType, *, num_padding: int = 0) -> None:
        """Declare a local tensor of which `num_padding` elements belong to no canonical tensor."""
        assert name not in self._tensors, name
        self._tensors[name] = LocalTensor(name, shape, dtype)
        if num_padding:
            self._padding[name] = num_padding

    def place_view(self, tensor: str, box: Box, local: str, offset: int, strides: tuple[int, ...]) -> None:
        """Put a canonical box at element `offset` of a local tensor, with a local stride per canonical dimension."""
        self._shards.append(Shard(tensor, box, local, offset, _unit_strides(box.shape, strides)))

    def place_box(self, tensor: str, box: Box, local: str, at: tuple[int, ...]) -> None:
        """Put a canonical box at index `at` of a local tensor with as many dimensions."""
        strides = contiguous_strides(self._tensors[local].shape)
        offset = sum(index * stride for index, stride in zip(at, strides, strict=True))
        self.place_view(tensor, box, local, offset, strides)

    def place_rows(self, tensor: str, rows: range, local: str, row: int) -> None:
        """Put canonical rows, whole in every other dimension, at local row `row`."""
        shape = self._canonical[tensor].shape
        box = Box((rows.start,) + (0,) * (len(shape) - 1), (rows.stop, *shape[1:]))
        self.place_box(tensor, box, local, (row,) + (0,) * (len(shape) - 1))

    def whole(self, tensor: str, local: str, dtype: DType) -> None:
        """Declare a local tensor that is a whole canonical tensor."""
        shape = self._canonical[tensor].shape
        self.local(local, shape, dtype)
        self.place_box(tensor, Box.whole(shape), local, (0,) * len(shape))

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """Return the canonical shape of a tensor."""
        return self._canonical[tensor].shape

    def build(self) -> ShardMap:
        """Return the map.

        Raises:
            LayoutError: When the shards do not cover each local tensor exactly, less its padding.
        """
        used = {shard.tensor for shard in self._shards}
        canonical = {name: tensor for name, tensor in self._canonical.items() if name in used}
        shard_map = ShardMap(self._place, self._tensors, tuple(self._shards), canonical, self._padding)
        check_local_coverage(shard_map)
        return shard_map


def _unit_strides(extents: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Give dimensions of extent 1, whose stride is never used, the one stride that they have everywhere.

    It is what the dimensions to the right span, as the layout that is learned from vLLM's loaders has it, so that equal
    shards compare equal.
    """
    result = list(strides)
    span = 1
    for dim in reversed(range(len(extents))):
        if extents[dim] == 1:
            result[dim] = span
        span = result[dim] * extents[dim]
    return tuple(result)


def check_local_coverage(shard_map: ShardMap) -> None:
    """Prove that the shards write each local tensor exactly once, but for its padding.

    Exact and cheap: offsets, strides and run lengths of a tensor's shards share a common divisor (a whole row, say), so
    marking one cell per divisor suffices, and layers of one kind share the proof.

    Raises:
        LayoutError: Naming the local tensor with the counts, or the shard that leaves its tensor or overlaps another.
    """
    shards: dict[str, list[Shard]] = {name: [] for name in shard_map.tensors}
    for shard in shard_map.shards:
        shards[shard.local].append(shard)
    proved: set[tuple[object, ...]] = set()
    for name, local in shard_map.tensors.items():
        padding = shard_map.padding.get(name, 0)
        pattern = (local.shape, padding, tuple((s.offset, s.strides, s.box.shape) for s in shards[name]))
        if pattern not in proved:
            _prove(local, shards[name], padding, shard_map.place)
            proved.add(pattern)


def _prove(local: LocalTensor, shards: list[Shard], padding: int, place: Place) -> None:
    size = math.prod(local.shape)
    cell = math.gcd(size, *(n for s in shards for n in _granularity(s)))
    marks = np.zeros(size // cell, dtype=bool)
    for shard in shards:
        cells = _cells(shard, cell)
        if shard.offset < 0 or int(cells.max()) >= marks.size:
            raise LayoutError(
                f"{place}: {shard.tensor} {shard.box} leaves {local.name}, which has {size} elements {local.shape}"
            )
        if marks[cells].any():
            raise LayoutError(
                f"{place}: {shard.tensor} {shard.box} overlaps another shard of {local.name} {local.shape}"
            )
        marks[cells] = True
    covered = int(marks.sum()) * cell
    if covered != size - padding:
        raise LayoutError(
            f"{place}: shards cover {covered} of the {size} elements of {local.name} {local.shape}, "
            f"expected {size - padding} ({padding} are padding)"
        )


def _granularity(shard: Shard) -> list[int]:
    """Return the numbers whose common divisor is a run that no shard boundary cuts."""
    steps = [(n, stride) for n, stride in zip(shard.box.shape, shard.strides, strict=True) if n > 1]
    runs = [n for n, stride in steps if stride == 1]
    return [shard.offset, *(runs or [1]), *(stride for _, stride in steps if stride != 1)]


def _cells(shard: Shard, cell: int) -> NDArray[np.int64]:
    cells = np.array([shard.offset // cell], dtype=np.int64)
    for extent, stride in zip(shard.box.shape, shard.strides, strict=True):
        if extent == 1:
            continue
        steps = np.arange(extent // cell) if stride == 1 else np.arange(extent) * (stride // cell)
        cells = (cells[:, None] + steps[None, :]).ravel()
    return cells
