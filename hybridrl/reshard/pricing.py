"""Prices a plan on a topology: bytes per rank, link class and NIC, messages, staging, and predicted seconds.

A device has one port into its own memory, one into its node and shares a NIC; every port sends and receives at its own rate.
Steps are the chunks: step k is chunk k of all destinations, which start together. A step takes as long as its busiest port,
counting the bytes that pass and the fixed cost of each message; seconds are the sum over steps. The lower bound is the time of the
busiest receiving port when it never waits, with the fewest bytes and no cost per message.

Worked example: two sources send 10 GB each over the network to one destination with a 40 GB/s NIC, in one step: each source's
NIC is busy for 0.25 s, the destination's for 0.5 s, so the step takes 0.5 s and the lower bound is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from hybridrl.layout.shard import Place
from hybridrl.reshard.boxes import IntArray
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.ports import Ports, Traffic
from hybridrl.reshard.topology import LinkClass, Topology

_GB = 1e9


@dataclass(frozen=True, slots=True)
class RankPrice:
    """What one rank moves; bytes are by :class:`LinkClass`, in its order."""

    place: Place
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    num_messages: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class PlanPrice:
    """What a plan costs.

    Attributes:
        sources: One per source of the plan, in order; `destinations` likewise.
        link_bytes: Total by link class.
        nic_sent_bytes: Node -> bytes that leave it per NIC; `nic_received_bytes` likewise.
        num_messages: Messages on the wire.
        staging_bytes: Largest staging memory of a destination: two chunks, for one is unpacked while the next arrives.
        seconds: Predicted.
        lower_bound_bytes: The fewest bytes that a plan can put on the wire.
        lower_bound_seconds: The least time in which the busiest destination can receive what it lacks.
    """

    topology: Topology
    sources: tuple[RankPrice, ...]
    destinations: tuple[RankPrice, ...]
    link_bytes: tuple[int, ...]
    nic_sent_bytes: dict[str, tuple[int, ...]]
    nic_received_bytes: dict[str, tuple[int, ...]]
    num_messages: int
    staging_bytes: int
    seconds: float
    lower_bound_bytes: int
    lower_bound_seconds: float

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave the memory of a device."""
        return self.link_bytes[LinkClass.NODE] + self.link_bytes[LinkClass.NETWORK]

    @property
    def bytes_per_destination(self) -> int:
        """Most bytes that a destination gets, those from its own device included."""
        return max(sum(rank.received_bytes) for rank in self.destinations)


def price_plan(plan: Plan, topology: Topology, lower_bound_bytes: int) -> PlanPrice:
    """Price a whole plan.

    Args:
        lower_bound_bytes: From :func:`~hybridrl.reshard.bound.lower_bound_bytes` of the same maps.
    """
    senders, num_sources = (*plan.sources, *plan.destinations), len(plan.sources)
    traffic, ports = _traffic(plan), Ports(senders, plan.destinations, topology)
    messages, local = traffic.messages(), traffic.where(traffic.link == LinkClass.DEVICE)
    sent = _totals(traffic.source, traffic, len(senders))
    received = _totals(traffic.destination, traffic, len(plan.destinations))
    num_sent = np.bincount(messages.source, minlength=len(senders)).tolist()
    num_received = np.bincount(messages.destination, minlength=len(plan.destinations)).tolist()
    staging, steps = _staging(messages, len(plan.destinations)), traffic.num_steps
    busy = ports.busy_seconds(messages, steps, topology.message_s) + ports.busy_seconds(local, steps)
    carried = ports.busy_seconds(traffic, steps).sum(axis=1)
    nic_sent, nic_received = ports.nic_bytes(traffic)
    none = (0,) * len(LinkClass)
    return PlanPrice(
        topology=topology,
        sources=tuple(RankPrice(place, sent[i], none, num_sent[i], 0) for i, place in enumerate(plan.sources)),
        destinations=tuple(
            RankPrice(
                place, sent[num_sources + i], received[i], num_sent[num_sources + i] + num_received[i], staging[i]
            )
            for i, place in enumerate(plan.destinations)
        ),
        link_bytes=tuple(sum(own[link] for own in received) for link in LinkClass),
        nic_sent_bytes=nic_sent,
        nic_received_bytes=nic_received,
        num_messages=len(messages.source),
        staging_bytes=max(staging),
        seconds=float(busy.max(axis=0).sum()),
        lower_bound_bytes=lower_bound_bytes,
        lower_bound_seconds=float(carried[ports.is_receiving].max()),
    )


def price_table(price: PlanPrice, title: str) -> Table:
    """Return the price as a table."""
    table = Table("", "total", "least", "most", title=f"{title} on {price.topology.name}", title_justify="left")

    def add(label: str, values: Sequence[float]) -> None:
        table.add_row(label, *(f"{value / _GB:.2f} GB" for value in (sum(values), min(values), max(values))))

    add("per generation rank", [sum(rank.received_bytes) for rank in price.destinations])
    for link in LinkClass:
        add(f"  from its {link.name.lower()}", [rank.received_bytes[link] for rank in price.destinations])
    for link in (LinkClass.NODE, LinkClass.NETWORK):
        add(f"per training rank, to its {link.name.lower()}", [rank.sent_bytes[link] for rank in price.sources])
    add("per NIC, out", [b for nics in price.nic_sent_bytes.values() for b in nics])
    add("per NIC, in", [b for nics in price.nic_received_bytes.values() for b in nics])
    add("staging per generation rank", [rank.staging_bytes for rank in price.destinations])
    table.add_section()
    table.add_row("on the wire", f"{price.wire_bytes / _GB:.2f} GB")
    table.add_row("lower bound", f"{price.lower_bound_bytes / _GB:.2f} GB")
    table.add_row("messages", f"{price.num_messages}")
    table.add_row("predicted", f"{price.seconds:.2f} s")
    table.add_row("lower bound", f"{price.lower_bound_seconds:.2f} s")
    return table


def _traffic(plan: Plan) -> Traffic:
    """Return all moves; senders are the sources and, after them, the destinations."""
    known: dict[str, int] = {}
    node_of_source, node_of_destination = (
        np.array([known.setdefault(place.node, len(known)) for place in places], dtype=np.int64)
        for places in (plan.sources, plan.destinations)
    )
    moves, relays = plan.moves, plan.relays
    is_remote = node_of_source[moves.source] != node_of_destination[moves.destination]
    wire = np.where(is_remote, LinkClass.NETWORK, LinkClass.NODE)
    link = np.where(moves.is_wire, wire, LinkClass.DEVICE).astype(np.int64)
    return Traffic(
        source=np.concatenate([moves.source, relays.source + len(plan.sources)]),
        destination=np.concatenate([moves.destination, relays.destination]),
        step=np.concatenate([moves.chunk, relays.chunk]),
        link=np.concatenate([link, np.full(len(relays), LinkClass.NODE, dtype=np.int64)]),
        num_bytes=np.concatenate([moves.num_bytes, relays.num_bytes]),
    )


def _totals(rank: IntArray, traffic: Traffic, num_ranks: int) -> list[tuple[int, ...]]:
    """Return the bytes of each rank by link class."""
    size = num_ranks * len(LinkClass)
    totals = np.bincount(rank * len(LinkClass) + traffic.link, weights=traffic.num_bytes, minlength=size)
    return [tuple(own) for own in totals.reshape(num_ranks, -1).astype(np.int64).tolist()]


def _staging(messages: Traffic, num_destinations: int) -> list[int]:
    """Return the staging memory of each destination: the largest two steps in a row."""
    num_steps, step = messages.num_steps, messages.destination * messages.num_steps + messages.step
    filled = np.bincount(step, weights=messages.num_bytes, minlength=num_destinations * num_steps)
    per_step = filled.reshape(num_destinations, num_steps).astype(np.int64)
    largest: list[int] = (per_step + np.pad(per_step[:, 1:], ((0, 0), (0, 1)))).max(axis=1).tolist()
    return largest
