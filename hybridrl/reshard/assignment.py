"""Who serves which piece of which destination: directly, or shared inside nodes.

Directly, every destination gets every piece from a source. Shared, what several destinations of one node need and no source of that
node holds crosses into the node once, to one of them, and the others *relay* it from there: it is on the wire as often, but on
the node's fast links instead of the network.

A destination whose element type is wider than the sources' takes its pieces directly: a relay would carry the wider type.

Worked example: two replicas of TP 2 on one node, sources elsewhere. Each half of the model goes to one rank of each replica: 4
halves cross the network directly; shared, 2 cross it and 2 go from rank to rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hybridrl.layout.shard import Place
from hybridrl.reshard.balance import Deal, Wish, deal_out
from hybridrl.reshard.boxes import IntArray
from hybridrl.reshard.geometry import Held, Wanted, World
from hybridrl.reshard.table import itemsizes

_NONE: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Services:
    """Pieces that destinations get from sources; a piece is counted within its destination.

    Attributes:
        destination: [n] int64; `piece` and `source` likewise.
    """

    destination: IntArray
    piece: IntArray
    source: IntArray

    @classmethod
    def concatenate(cls, parts: Iterable[Services]) -> Services:
        """Return all of several."""
        own = list(parts)
        names = ("destination", "piece", "source")
        return cls(*(np.concatenate([_NONE, *(getattr(part, name) for part in own)]) for name in names))

    def where(self, rows: IntArray | NDArray[np.bool_]) -> Services:
        """Return some of them."""
        return Services(self.destination[rows], self.piece[rows], self.source[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Relays:
    """Pieces that destinations take from each other.

    Attributes:
        destination: [n] int64; `piece` is that destination's.
        peer: [n] int64, the destination that has it; `peer_piece` is that one's.
    """

    destination: IntArray
    piece: IntArray
    peer: IntArray
    peer_piece: IntArray

    def where(self, rows: IntArray) -> Relays:
        """Return some of them."""
        return Relays(self.destination[rows], self.piece[rows], self.peer[rows], self.peer_piece[rows])


NO_RELAYS = Relays(_NONE, _NONE, _NONE, _NONE)


class Assignment(Protocol):
    """The choices of a plan."""

    relays: Relays

    def services(self) -> Services:
        """Return what all sources serve."""
        ...

    def received_by(self, destination: int) -> Services:
        """Return what one destination gets from sources."""
        ...

    def served_by(self, source: int) -> Services:
        """Return what one source serves."""
        ...


class Direct:
    """Every destination gets every piece from a source."""

    relays = NO_RELAYS

    def __init__(self, world: World, held: Held, wanted: Wanted) -> None:
        own = [wanted.of_table(table) for table in range(len(world.destinations.tables))]
        wishes = [Wish.of(held.holder_set[wanted.cell[pieces]], wanted.num_bytes[pieces]) for pieces in own]
        sides = zip(world.destinations.places, world.destinations.table_of, strict=True)
        demands = [(place, wishes[table]) for place, table in sides]
        self._deals = deal_out(world.sources.places, _ranks_of_sets(world, held), demands)

    def services(self) -> Services:
        """Return what all sources serve."""
        return Services.concatenate(self.received_by(destination) for destination in range(len(self._deals)))

    def received_by(self, destination: int) -> Services:
        """Return what one destination gets from sources."""
        return Services.concatenate(_service(destination, deal) for deal in self._deals[destination])

    def served_by(self, source: int) -> Services:
        """Return what one source serves."""
        return Services.concatenate(
            Services(np.full_like(pieces, destination), pieces, np.full_like(pieces, source))
            for destination, deals in enumerate(self._deals)
            for deal in deals
            if len(pieces := deal.pieces_of(source))
        )


class Shared:
    """What several destinations of a node need crosses into the node once."""

    def __init__(self, world: World, held: Held, wanted: Wanted) -> None:
        places, ranks = world.destinations.places, _ranks_of_sets(world, held)
        nodes = [{world.sources.places[rank].node for rank in members} for members in ranks]
        demands: list[tuple[Place, Wish]] = []
        far: dict[str, list[tuple[int, IntArray]]] = {}
        for destination, (place, table) in enumerate(zip(places, world.destinations.table_of, strict=True)):
            own = wanted.of_table(table)
            sets = held.holder_set[wanted.cell[own]]
            is_near = np.array([place.node in members for members in nodes], dtype=bool)[sets]
            is_near |= _is_widened(world, held, wanted, own)
            near = np.flatnonzero(is_near)
            demands.append((place, Wish.of(sets[near], wanted.num_bytes[own[near]], near)))
            far.setdefault(place.node, []).append((destination, np.flatnonzero(~is_near)))
        identity = wanted.identities(world.destinations.rows)
        groups = [_NodeGroups(world, held, wanted, identity, own) for own in far.values()]
        demands += [(Place("", 0, node, ""), own.wish) for node, own in zip(far, groups, strict=True)]
        deals = deal_out(world.sources.places, ranks, demands)
        near_ones = [_service(destination, deal) for destination in range(len(places)) for deal in deals[destination]]
        far_ones = [own.choose(d) for own, dealt in zip(groups, deals[len(places) :], strict=True) for d in dealt]
        self._services = Services.concatenate(near_ones + far_ones)
        relays = [own.relays() for own in groups]
        names = ("destination", "piece", "peer", "peer_piece")
        self.relays = Relays(*(np.concatenate([getattr(part, name) for part in relays]) for name in names))

    def services(self) -> Services:
        """Return what all sources serve."""
        return self._services

    def received_by(self, destination: int) -> Services:
        """Return what one destination gets from sources."""
        return self._services.where(self._services.destination == destination)

    def served_by(self, source: int) -> Services:
        """Return what one source serves."""
        return self._services.where(self._services.source == source)


def _is_widened(world: World, held: Held, wanted: Wanted, pieces: IntArray) -> NDArray[np.bool_]:
    """Return [len(pieces)] bool: whether the destination's element type is wider than the one that travels."""
    is_widened: NDArray[np.bool_] = itemsizes(world.destinations.rows.dtype[wanted.row[pieces]]) > itemsizes(
        held.dtype[wanted.cell[pieces]]
    )
    return is_widened


def _service(destination: int, deal: Deal) -> Services:
    return Services(np.full_like(deal.pieces, destination), deal.pieces, deal.sources())


class _NodeGroups:
    """Pieces that destinations of one node take from other nodes, grouped by what they are."""

    def __init__(
        self, world: World, held: Held, wanted: Wanted, identity: IntArray, own: list[tuple[int, IntArray]]
    ) -> None:
        self._destination = np.concatenate([np.full_like(pieces, to) for to, pieces in own])
        self._piece = np.concatenate([pieces for _, pieces in own])
        tables = np.array(world.destinations.table_of, dtype=np.int64)[self._destination]
        piece = self._piece + np.array(wanted.bounds, dtype=np.int64)[tables]
        same = identity[piece]
        self._order = np.lexsort((self._destination, same))
        first = np.flatnonzero(np.diff(same[self._order], prepend=-1))
        self._count = np.diff(first, append=len(same))
        example = piece[self._order[first]]
        self._chosen = self._order[first + self._turns(self._order[first], wanted.num_bytes[example]) % self._count]
        self.wish = Wish.of(held.holder_set[wanted.cell[example]], wanted.num_bytes[example])

    def _turns(self, entry: IntArray, num_bytes: IntArray) -> IntArray:
        """Number the groups that the same destinations share, largest first, so that these take turns.

        Groups with the same first destination and as many members are taken to have the same ones, as those of replicas have.
        """
        order = np.lexsort((-num_bytes, self._count, self._destination[entry]))
        keys = np.stack([self._destination[entry][order], self._count[order]])
        opens = np.flatnonzero((np.diff(keys, axis=1, prepend=-1) != 0).any(axis=0))
        turns: IntArray = np.empty_like(order)
        turns[order] = np.arange(len(order)) - np.repeat(opens, np.diff(opens, append=len(order)))
        return turns

    def choose(self, deal: Deal) -> Services:
        """Return what crosses into the node, with its source and the destination that takes it."""
        entry = self._chosen[deal.pieces]
        return Services(self._destination[entry], self._piece[entry], deal.sources())

    def relays(self) -> Relays:
        """Return what is passed on inside the node."""
        chosen = self._chosen[np.repeat(np.arange(len(self._count)), self._count)]
        is_relayed = self._order != chosen
        entry, peer = self._order[is_relayed], chosen[is_relayed]
        return Relays(self._destination[entry], self._piece[entry], self._destination[peer], self._piece[peer])


def _ranks_of_sets(world: World, held: Held) -> list[list[int]]:
    """Return the source ranks of each set of holders, ascending."""
    ranks: list[list[int]] = [[] for _ in world.sources.tables]
    for rank, table in enumerate(world.sources.table_of):
        ranks[table].append(rank)
    return [sorted(rank for table in tables for rank in ranks[table]) for tables in held.sets]
