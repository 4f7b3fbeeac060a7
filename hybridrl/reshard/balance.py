"""Chooses the source of every piece: the nearest holder, and an even share among holders that are equally near.

A *class* is a set of sources that some destinations may choose freely among: all on the destination's node if any holder is
there, else all holders. Classes are dealt with one after the other, small ones first. Within a class the pieces are sorted by
size, largest first, and dealt out in turn to the sources, the one with the least so far first.

Why that is even: dealing sizes s1 >= s2 >= ... in turn, a source dealt to earlier gets at least as much as one dealt to later,
and at most s1 more, since each of its later pieces is no larger than the other's previous one. So two sources that share a class
differ by at most its largest piece after it when they were equal before it, and the one that was behind is dealt to first, so
by induction two sources that share all their classes (replicas equally near to everyone) never differ by more than one piece.

Worked example: pieces of 8, 8, 4, 4, 4 bytes on sources a, b: a gets 8 + 4 + 4, b gets 8 + 4; the next class starts with b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.layout.shard import Place
from hybridrl.reshard.boxes import IntArray

Class = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Demand:
    """What one destination wants.

    Attributes:
        holder_set: [num_pieces] int64, index into the sets of holders.
        num_bytes: [num_pieces] int64.
    """

    place: Place
    holder_set: IntArray
    num_bytes: IntArray


def choose_sources(
    sources: Sequence[Place], holder_sets: Sequence[Sequence[int]], demands: Sequence[Demand]
) -> IntArray:
    """Return the source of each piece, demand after demand; a pure function of its arguments.

    Args:
        holder_sets: Ascending source indices of each set.
    """
    near = _Nearness(sources, holder_sets)
    class_of = [_classes_of(demand, near) for demand in demands]
    classes = np.concatenate([np.zeros(0, np.int64), *class_of])
    num_bytes = np.concatenate([np.zeros(0, np.int64), *(demand.num_bytes for demand in demands)])
    chosen: IntArray = np.array([members[0] for members in near.classes], dtype=np.int64)[classes]
    contested = np.flatnonzero(np.array([len(members) > 1 for members in near.classes], dtype=bool)[classes])
    chosen[contested] = _deal(near.classes, classes[contested], num_bytes[contested], len(sources))
    return chosen


def _classes_of(demand: Demand, near: _Nearness) -> IntArray:
    sets, inverse = np.unique(demand.holder_set, return_inverse=True)
    classes: IntArray = np.array([near.class_of(int(s), demand.place) for s in sets], dtype=np.int64)[inverse]
    return classes


def _deal(classes: Sequence[Class], class_of: IntArray, num_bytes: IntArray, num_sources: int) -> IntArray:
    """Return the source of each contested piece."""
    out = np.zeros(len(class_of), dtype=np.int64)
    loads = np.zeros(num_sources, dtype=np.int64)
    order = np.lexsort((-num_bytes, class_of))
    bounds = np.searchsorted(class_of[order], np.arange(len(classes) + 1))
    for index in sorted(range(len(classes)), key=lambda c: (len(classes[c]), classes[c])):
        rows = order[bounds[index] : bounds[index + 1]]
        if not len(rows):
            continue
        members = np.array(classes[index], dtype=np.int64)
        members = members[np.argsort(loads[members], kind="stable")]
        turn = np.arange(len(rows)) % len(members)
        out[rows] = members[turn]
        loads[members] += np.bincount(turn, weights=num_bytes[rows], minlength=len(members)).astype(np.int64)
    return out


class _Nearness:
    """The class in which a destination looks for each set of holders."""

    def __init__(self, sources: Sequence[Place], holder_sets: Sequence[Sequence[int]]) -> None:
        self._sources = sources
        self._sets = holder_sets
        self._members = [frozenset(members) for members in holder_sets]
        self._on_device: dict[tuple[str, str], list[int]] = {}
        for index, place in enumerate(sources):
            self._on_device.setdefault((place.node, place.device), []).append(index)
        self._on_node: dict[tuple[int, str], int] = {}
        self._known: dict[Class, int] = {}
        self.classes: list[Class] = []

    def class_of(self, holder_set: int, to: Place) -> int:
        """Return the index in `classes` of the nearest holders; one on the same device stands alone."""
        for source in self._on_device.get((to.node, to.device), ()):
            if source in self._members[holder_set]:
                return self._index((source,))
        key = (holder_set, to.node)
        if key not in self._on_node:
            members = self._sets[holder_set]
            on_node = tuple(source for source in members if self._sources[source].node == to.node)
            self._on_node[key] = self._index(on_node or tuple(members))
        return self._on_node[key]

    def _index(self, members: Class) -> int:
        if members not in self._known:
            self._known[members] = len(self.classes)
            self.classes.append(members)
        return self._known[members]
