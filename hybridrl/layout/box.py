"""Boxes: the ranges of canonical tensors in which every layout is written.

The canonical space is the set of tensors of the Hugging Face checkpoint, one per expert, without vocabulary padding.
A box is a half-open range per dimension, ``start[d] <= index[d] < stop[d]``.
"""

from __future__ import annotations

import enum
import math
import operator
from dataclasses import dataclass


class DType(enum.Enum):
    """Element types that a weight can have; the value is the safetensors code."""

    FLOAT32 = "F32"
    BFLOAT16 = "BF16"
    FLOAT16 = "F16"
    INT64 = "I64"
    INT32 = "I32"
    UINT8 = "U8"
    FLOAT8_E4M3 = "F8_E4M3"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.FLOAT32: 4,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.UINT8: 1,
    DType.FLOAT8_E4M3: 1,
}


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A half-open range per dimension of one canonical tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dimension."""
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common box, or None when it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` lies in this box."""
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major element strides. Example: (4, 3) -> (3, 1)."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
