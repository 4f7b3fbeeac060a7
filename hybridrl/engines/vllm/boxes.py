"""From the copies that a weight loader makes to the shards of the layout language.

A loader copies views: a slice of a checkpoint tensor into a slice of a parameter. Each such copy is a :class:`Write`, geometry
only. :func:`shards_of_write` turns it into boxes with an affine local view, and :func:`merge_shards` joins boxes that
continue each other, so that the result does not depend on how finely a loader happened to cut.

Worked example: q_proj [32, 16] on the second of two ranks, loaded by ``qkv[0:16].copy_(q_proj[16:32])``. The write has shape
(16, 16), source offset 256 and strides (16, 1), target offset 0 and strides (16, 1); the shard is box ``[16:32, 0:16]`` at local
offset 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hybridrl.errors import LayoutError
from hybridrl.layout.box import Box, contiguous_strides
from hybridrl.layout.shard import CanonicalTensor, Shard


@dataclass(frozen=True, slots=True)
class Write:
    """One recorded copy of a view of a canonical tensor into a view of a local tensor; all numbers count elements.

    Attributes:
        shape: Shape of both views.
        source_offset: First element in the canonical tensor, stored row-major.
        target_offset: First element in the local tensor, stored row-major.
    """

    tensor: str
    local: str
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of a write: how many steps, and how far each goes on either side."""

    extent: int
    source: int
    target: int


def shards_of_write(write: Write, canonical: CanonicalTensor) -> Iterator[Shard]:
    """Yield the shards of one write: one when it copies a box, several when it steps over canonical elements.

    Raises:
        LayoutError: When the source view reads elements more than once or leaves the tensor.
    """
    axes = [
        _Axis(extent, source, target)
        for extent, source, target in zip(write.shape, write.source_strides, write.target_strides, strict=True)
        if extent > 1
    ]
    yield from _expand(write, canonical, axes, write.source_offset, write.target_offset)


def _expand(
    write: Write, canonical: CanonicalTensor, axes: Sequence[_Axis], source: int, target: int
) -> Iterator[Shard]:
    """Assign each axis to one canonical dimension; enumerate an axis that is no contiguous range of a dimension."""
    strides = contiguous_strides(canonical.shape)
    start = tuple(source // stride % size for stride, size in zip(strides, canonical.shape, strict=True))
    assigned: dict[int, _Axis] = {}
    pending = list(axes)
    while pending:
        axis = pending.pop()
        dim = _dimension_of(axis, canonical, strides, write)
        room = canonical.shape[dim] - start[dim]
        if axis.source != strides[dim] or dim in assigned:
            rest = pending + list(assigned.values())
            for step in range(axis.extent):
                yield from _expand(write, canonical, rest, source + step * axis.source, target + step * axis.target)
            return
        if axis.extent <= room:
            assigned[dim] = axis
        elif start[dim] == 0 and axis.extent % room == 0 and dim > 0:
            pending.append(_Axis(room, axis.source, axis.target))
            pending.append(_Axis(axis.extent // room, axis.source * room, axis.target * room))
        else:
            raise _not_a_box(write, canonical)
    yield _box_shard(write, canonical, start, assigned, target)


def _dimension_of(axis: _Axis, canonical: CanonicalTensor, strides: tuple[int, ...], write: Write) -> int:
    """Return the outermost dimension that moves by whole steps of `axis`."""
    for dim, (stride, size) in enumerate(zip(strides, canonical.shape, strict=True)):
        if size > 1 and stride <= axis.source and axis.source % stride == 0:
            return dim
    raise _not_a_box(write, canonical)


def _box_shard(
    write: Write, canonical: CanonicalTensor, start: tuple[int, ...], axes: dict[int, _Axis], target: int
) -> Shard:
    extents = tuple(axes[dim].extent if dim in axes else 1 for dim in range(len(start)))
    box = Box(start, tuple(a + n for a, n in zip(start, extents, strict=True)))
    if not Box.whole(canonical.shape).contains(box):
        raise _not_a_box(write, canonical)
    strides = [0] * len(start)
    span = 1
    for dim in reversed(range(len(start))):
        strides[dim] = axes[dim].target if dim in axes else span
        span = strides[dim] * extents[dim]
    return Shard(write.tensor, box, write.local, target, tuple(strides))


def _not_a_box(write: Write, canonical: CanonicalTensor) -> LayoutError:
    return LayoutError(
        f"{write.local}: the weight loader copies {write.tensor} {canonical.shape} through a view of shape {write.shape}, "
        f"offset {write.source_offset} and strides {write.source_strides}, which is not a set of boxes"
    )


def merge_shards(shards: Iterable[Shard]) -> list[Shard]:
    """Join shards that continue each other in one dimension, until none does; order by local offset."""
    merged = list(shards)
    for dim in reversed(range(max((len(shard.strides) for shard in merged), default=0))):
        merged = _merge_along(merged, dim)
    return sorted(merged, key=lambda shard: (shard.local, shard.offset, shard.tensor))


def _merge_along(shards: list[Shard], dim: int) -> list[Shard]:
    result: list[Shard] = []
    for shard in sorted(shards, key=lambda s: (s.tensor, s.local, _across(s.box.start, dim), s.box.start)):
        joined = _join(result[-1], shard, dim) if result else None
        if joined is None:
            result.append(shard)
        else:
            result[-1] = joined
    return result


def _across(index: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Return an index without dimension `dim`, or all of it when it has no such dimension."""
    return index[:dim] + index[dim + 1 :]


def _join(first: Shard, second: Shard, dim: int) -> Shard | None:
    """Return the shard that covers both, or None when `second` does not continue `first` along `dim`."""
    a, b = first.box, second.box
    if (first.tensor, first.local) != (second.tensor, second.local) or dim >= len(a.start):
        return None
    if a.stop[dim] != b.start[dim] or _across(a.start, dim) != _across(b.start, dim):
        return None
    if _across(a.stop, dim) != _across(b.stop, dim):
        return None
    extents = a.shape
    if any(n > 1 and first.strides[d] != second.strides[d] for d, n in enumerate(extents) if d != dim):
        return None
    step, remainder = divmod(second.offset - first.offset, extents[dim])
    is_affine = (extents[dim] == 1 or first.strides[dim] == step) and (b.shape[dim] == 1 or second.strides[dim] == step)
    if remainder or step <= 0 or not is_affine:
        return None
    strides = (*first.strides[:dim], step, *first.strides[dim + 1 :])
    return replace(first, box=Box(a.start, b.stop), strides=strides)
