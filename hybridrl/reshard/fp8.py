"""Blocks of float8 weights: where their scales lie, and which cuts of a weight leave blocks whole.

A float8 checkpoint holds, beside each quantised weight of shape [N, K], ``weight_scale_inv`` of shape [N / 128, K / 128], rounded up:
one float32 per block of 128 x 128. A rank can quantise its shard alone only if no block is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.errors import ReshardError
from hybridrl.layout.box import Box

BLOCK = 128


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the scales of a weight. Example: (256, 300) -> (2, 3)."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


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
