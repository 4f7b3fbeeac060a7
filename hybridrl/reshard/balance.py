"""Chooses the source of every piece: the nearest holder, and an even share among holders that are equally near.

A *class* is a set of sources that a destination may choose freely among: all on its node if any holder is there, else all
holders. What one destination wants from one class is a *deal*: its pieces, largest first, go in turn to the members of the class,
the one with the least so far first. Deals are made one after the other, those of small classes first.

Why that is even: dealing sizes s1 >= s2 >= ... in turn, a source dealt to earlier gets at least as much as one dealt to later,
and at most s1 more, since each of its later pieces is no larger than the other's previous one. The one that is behind is dealt to
first. So by induction two sources that share all their deals (replicas equally near to everyone) never differ by more than
one piece.

Worked example: a destination wants 8, 8, 4, 4, 4 bytes from sources a, b: a gets 8 + 4 + 4, b gets 8 + 4; next time b is first.

A deal is small and says everything, so a rank lists the pieces that concern it without looking at those of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.layout.shard import Place
from hybridrl.reshard.boxes import IntArray

Class = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Wish:
    """What the destinations of one map want.

    Attributes:
        sets: The sets of holders that occur.
        pieces: For each of them its pieces, largest first.
        num_bytes: Their sizes.
    """

    sets: list[int]
    pieces: list[IntArray]
    num_bytes: list[IntArray]

    @classmethod
    def of(cls, holder_set: IntArray, num_bytes: IntArray, pieces: IntArray | None = None) -> Wish:
        """Group pieces, by default numbered from 0, by their set of holders."""
        order = np.lexsort((-num_bytes, holder_set))
        sets, first = np.unique(holder_set[order], return_index=True)
        named = order if pieces is None else pieces[order]
        return cls(sets.tolist(), np.split(named, first[1:]), np.split(num_bytes[order], first[1:]))

    def shares(self, position: int, num_members: int) -> list[int]:
        """Return the bytes that each of `num_members` gets when the pieces of a set are dealt in turn."""
        sizes = self.num_bytes[position]
        turns = np.pad(sizes, (0, -len(sizes) % num_members)).reshape(-1, num_members)
        shares: list[int] = turns.sum(axis=0).tolist()
        return shares


@dataclass(frozen=True, slots=True, eq=False)
class Deal:
    """Pieces of one destination, dealt in turn to `members`."""

    pieces: IntArray
    members: Class

    def sources(self) -> IntArray:
        """Return the source of each piece."""
        turns: IntArray = np.array(self.members, dtype=np.int64)[np.arange(len(self.pieces)) % len(self.members)]
        return turns

    def pieces_of(self, source: int) -> IntArray:
        """Return the pieces that a source serves."""
        if source not in self.members:
            return self.pieces[:0]
        return self.pieces[self.members.index(source) :: len(self.members)]


def deal_out(
    sources: Sequence[Place], holder_sets: Sequence[Sequence[int]], demands: Sequence[tuple[Place, Wish]]
) -> list[list[Deal]]:
    """Return the deals of each destination; a pure function of its arguments.

    Args:
        holder_sets: Ascending source indices of each set.
        demands: Where each destination is and what it wants.
    """
    near = _Nearness(sources, holder_sets)
    wanted = [
        (near.class_of(holder_set, place), destination, position)
        for destination, (place, wish) in enumerate(demands)
        for position, holder_set in enumerate(wish.sets)
    ]
    rank = {index: r for r, index in enumerate(sorted(range(len(near.classes)), key=near.size_and_members))}
    loads = [0] * len(sources)
    shares: dict[tuple[int, int, int], list[int]] = {}
    deals: list[list[Deal]] = [[] for _ in demands]
    for index, destination, position in sorted(wanted, key=lambda deal: (rank[deal[0]], *deal[1:])):
        wish, members = demands[destination][1], near.classes[index]
        if len(members) > 1:
            members = tuple(sorted(members, key=loads.__getitem__))
            key = (id(wish), position, len(members))
            if key not in shares:
                shares[key] = wish.shares(position, len(members))
            for source, num_bytes in zip(members, shares[key], strict=True):
                loads[source] += num_bytes
        deals[destination].append(Deal(wish.pieces[position], members))
    return deals


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

    def size_and_members(self, index: int) -> tuple[int, Class]:
        """Return what classes are ordered by."""
        return len(self.classes[index]), self.classes[index]

    def _index(self, members: Class) -> int:
        if members not in self._known:
            self._known[members] = len(self.classes)
            self.classes.append(members)
        return self._known[members]
