"""Shards and shard maps: where one rank keeps which box of which canonical tensor.

A :class:`Shard` ties a box of a canonical tensor to a strided view of a local tensor. A :class:`ShardMap` is all the
shards of one rank; Megatron ranks, vLLM workers and safetensors files each produce one, and the planner reads nothing else.

Worked example: a fused QKV weight on one of two tensor-parallel ranks, 4 query heads, 2 KV heads, head size 8, hidden
16. Rank 1 holds local rows ``[q2, q3, k1, v1]``, so its map has, among others,
``Shard("model.layers.0.self_attn.k_proj.weight", Box((8, 0), (16, 16)), "decoder...linear_qkv.weight", offset=256,
strides=(16, 1))``: canonical rows 8..15 of k_proj start at local row 16, element 16 * 16 = 256.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridrl.layout.box import Box, DType


@dataclass(frozen=True, slots=True)
class CanonicalTensor:
    """One tensor of the Hugging Face checkpoint.

    Attributes:
        shape: The dimensions in which boxes are written.
        stored_shape: Shape in files when it differs from `shape`, always of the same elements in the same order. Example:
            columns g0 u0 g1 u1 of a stored [16, 8] are [16, 4, 2] here, so that gate and up are one box each.
        dtype: Element type that the tensor keeps whatever the model's type, or None.
    """

    name: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...] | None = None
    dtype: DType | None = None

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape in checkpoint files."""
        return self.stored_shape or self.shape


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor as a rank stores it, contiguous in row-major order of `shape`."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def num_bytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a canonical tensor <-> a strided view of a local tensor.

    Canonical element ``box.start + i`` lies at local element ``offset + sum(i[d] * strides[d])``.

    Attributes:
        tensor: Canonical name.
        box: Range per canonical dimension.
        local: Name of the local tensor.
        offset: Element offset of the box's first element inside the local tensor.
        strides: Local element stride per canonical dimension.
    """

    tensor: str
    box: Box
    local: str
    offset: int
    strides: tuple[int, ...]

    def offset_of(self, box: Box) -> int:
        """Return the local element offset of the first element of `box`, which must lie inside this shard."""
        return self.offset + sum(
            (a - b) * stride for a, b, stride in zip(box.start, self.box.start, self.strides, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where the memory of a rank is.

    Attributes:
        role: "actor", "rollout", "checkpoint", ...
        rank: Rank inside the role; rollout replicas number their workers through.
        node: Host name; equal names share memory.
        device: Device identity within the node; equal (node, device) means that a copy is local and costs no wire.
    """

    role: str
    rank: int
    node: str
    device: str

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class ShardMap:
    """All shards of one rank.

    Attributes:
        place: Whose memory this is.
        tensors: Local tensors by name.
        shards: Every loadable piece; together they cover each local tensor except its `padding`.
        canonical: Shape of every canonical tensor that a shard names.
        padding: Local tensor name -> number of elements that no canonical element maps to (vocabulary padding).
    """

    place: Place
    tensors: Mapping[str, LocalTensor]
    shards: tuple[Shard, ...]
    canonical: Mapping[str, CanonicalTensor]
    padding: Mapping[str, int] = field(default_factory=dict)

    def by_tensor(self) -> dict[str, list[Shard]]:
        """Group the shards by canonical tensor, in map order."""
        groups: dict[str, list[Shard]] = {}
        for shard in self.shards:
            groups.setdefault(shard.tensor, []).append(shard)
        return groups
