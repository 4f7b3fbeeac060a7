"""Arithmetic on many boxes at once: pairs of equal tensors, intersections, and the cut into disjoint cells."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrl.layout.box import Box

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes of canonical tensors, as columns.

    Attributes:
        tensor: [n] int64.
        start: [n, num_dims] int64; `stop` likewise.
    """

    tensor: IntArray
    start: IntArray
    stop: IntArray

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, rows: IntArray | NDArray[np.bool_] | list[int]) -> Boxes:
        index = np.flatnonzero(rows) if isinstance(rows, np.ndarray) and rows.dtype == bool else rows
        return Boxes(self.tensor.take(index), self.start.take(index, axis=0), self.stop.take(index, axis=0))

    def volumes(self) -> IntArray:
        """Return [n] int64, the number of elements of each box; 0 where it is empty."""
        extents = np.maximum(self.stop - self.start, 0)
        return functools.reduce(np.multiply, extents.T)  # numpy reduces short rows slowly

    def intersect(self, other: Boxes) -> Boxes:
        """Return the common box row by row; it may be empty."""
        return Boxes(self.tensor, np.maximum(self.start, other.start), np.minimum(self.stop, other.stop))

    def box(self, row: int) -> Box:
        """Return one box, padding dimensions included."""
        return Box(tuple(self.start[row].tolist()), tuple(self.stop[row].tolist()))

    def boxes(self) -> list[Box]:
        """Return all boxes, padding dimensions included."""
        return [Box(tuple(a), tuple(b)) for a, b in zip(self.start.tolist(), self.stop.tolist(), strict=True)]

    @staticmethod
    def concatenate(parts: list[Boxes]) -> Boxes:
        """Return the boxes of all parts, in order."""
        return Boxes(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("tensor", "start", "stop")))


def match(left: IntArray, right: IntArray) -> tuple[IntArray, IntArray]:
    """Return every pair (i, j) with left[i] == right[j], ordered by j and then i; `left` is sorted.

    Example: left [0, 0, 2], right [2, 0] -> i [2, 0, 1], j [0, 1, 1].
    """
    first = np.searchsorted(left, right)
    counts = np.searchsorted(left, right, side="right") - first
    j = np.repeat(np.arange(len(right)), counts)
    skipped = np.repeat(np.cumsum(counts) - counts - first, counts)
    return np.arange(len(j)) - skipped, j


def first_overlap(boxes: Boxes) -> tuple[int, int] | None:
    """Return two rows of one tensor whose boxes meet, or None; `boxes` are sorted by tensor."""
    i, j = _meeting(boxes)
    return (int(i[0]), int(j[0])) if len(i) else None


def _meeting(boxes: Boxes) -> tuple[IntArray, IntArray]:
    same = np.diff(boxes.tensor) == 0
    crowded = np.flatnonzero(np.append(same, False) | np.append(False, same))
    i, j = match(boxes.tensor[crowded], boxes.tensor[crowded])
    i, j = crowded[i[i < j]], crowded[j[i < j]]
    meet = boxes[i].intersect(boxes[j]).volumes() > 0
    return i[meet], j[meet]


@dataclass(frozen=True, eq=False)
class Cells:
    """Disjoint boxes, sorted by tensor and start, and which of the original boxes contain each.

    Attributes:
        cell: [num_pairs] int64, ascending; `row` is an original box that contains it, ascending within a cell.
    """

    boxes: Boxes
    cell: IntArray
    row: IntArray


def disjoint_cells(boxes: Boxes) -> Cells:
    """Cut boxes at each other's edges where they overlap partly; equal boxes share one cell.

    Example: rows 0:70 and 40:100 of a tensor -> cells 0:40, 40:70 (in both) and 70:100.
    """
    cells = distinct_boxes(boxes)
    meeting = _meeting(cells.boxes)[0]
    return _cut(cells, np.unique(cells.boxes.tensor[meeting])) if len(meeting) else cells


def distinct_boxes(boxes: Boxes) -> Cells:
    """Return each box once, and which of the original boxes equal it."""
    keys = packed([boxes.tensor, *boxes.start.T, *boxes.stop.T])
    order = np.lexsort(keys[::-1])
    is_new = np.zeros(len(order), dtype=bool)
    for key in keys:
        is_new |= np.diff(key[order], prepend=-1) != 0
    return Cells(boxes[order[is_new]], np.cumsum(is_new) - 1, order)


def packed(columns: list[IntArray], below: int = 1 << 62) -> list[IntArray]:
    """Return fewer columns of the same lexicographic order; all are at least 0, and as long as `below` allows below it.

    Example: columns [0, 1] and [7, 4] -> one column [7, 12], since the second is below 8.
    """
    kept: list[IntArray] = []
    room = 0
    for column in columns:
        extent = int(column.max(initial=0)) + 1
        if extent <= room:
            kept[-1] = kept[-1] * extent + column
            room //= extent
        else:
            kept.append(column)
            room = below // extent
    return kept


def _cut(cells: Cells, tensors: IntArray) -> Cells:
    """Cut the cells of `tensors` at each other's edges."""
    kept = np.flatnonzero(~np.isin(cells.boxes.tensor, tensors))
    new: list[tuple[int, Box, int]] = []
    for tensor in tensors.tolist():
        rows = np.flatnonzero(cells.boxes.tensor == tensor).tolist()
        boxes = [cells.boxes.box(row) for row in rows]
        for part in grid(boxes):
            new += [(tensor, part, row) for row, box in zip(rows, boxes, strict=True) if box.contains(part)]
    added = Boxes(
        np.array([tensor for tensor, _, _ in new], dtype=np.int64),
        np.array([box.start for _, box, _ in new], dtype=np.int64),
        np.array([box.stop for _, box, _ in new], dtype=np.int64),
    )
    parent = np.concatenate([kept, np.array([row for _, _, row in new], dtype=np.int64)])
    again = disjoint_cells(Boxes.concatenate([cells.boxes[kept], added]))
    i, j = match(cells.cell, parent[again.row])
    cell, container = again.cell[j], cells.row[i]
    order = np.lexsort((container, cell))
    return Cells(again.boxes, cell[order], container[order])


def grid(boxes: list[Box]) -> Iterator[Box]:
    """Yield the cells into which the edges of `boxes` cut the space between them."""
    cuts = [sorted({edge for box in boxes for edge in (box.start[d], box.stop[d])}) for d in range(len(boxes[0].start))]
    for spans in itertools.product(*(itertools.pairwise(edges) for edges in cuts)):
        yield Box(tuple(a for a, _ in spans), tuple(b for _, b in spans))


def first_missing(want: Box, have: list[Box]) -> Box:
    """Return a part of `want` that no box of `have`, each inside it, covers."""
    return next(cell for cell in grid([want, *have]) if not any(box.contains(cell) for box in have))
