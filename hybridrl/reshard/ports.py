"""The ports of a cluster and how long each is busy while a plan runs.

A device has a port into its own memory, one out of and one into its node; a NIC has one out and one in, for all its devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hybridrl.layout.shard import Place
from hybridrl.reshard.boxes import IntArray
from hybridrl.reshard.topology import LinkClass, Topology

Seconds = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes that go from sources to destinations in steps.

    Attributes:
        source: [n] int64; `destination`, `step`, `link` (a :class:`LinkClass`) and `num_bytes` likewise.
    """

    source: IntArray
    destination: IntArray
    step: IntArray
    link: IntArray
    num_bytes: IntArray

    @property
    def num_steps(self) -> int:
        """Number of steps up to the last in which something goes."""
        return int(self.step.max(initial=0)) + 1

    def where(self, rows: IntArray | NDArray[np.bool_]) -> Traffic:
        """Return some of the entries."""
        return Traffic(
            self.source[rows], self.destination[rows], self.step[rows], self.link[rows], self.num_bytes[rows]
        )

    def messages(self) -> Traffic:
        """Return one entry per message on a wire: what one source sends to one destination in one step."""
        wire = np.flatnonzero(self.link != LinkClass.DEVICE)
        order = wire[np.lexsort((self.source[wire], self.step[wire], self.destination[wire]))]
        keys = np.stack([self.destination[order], self.step[order], self.source[order]])
        opens = np.flatnonzero((np.diff(keys, axis=1, prepend=-1) != 0).any(axis=0))
        num_bytes = np.add.reduceat(self.num_bytes[order], opens) if len(opens) else self.num_bytes[:0]
        return replace(self.where(order[opens]), num_bytes=num_bytes)


class Ports:
    """Numbers the ports of all places: device memory, out of device, into device, out of NIC, into NIC."""

    def __init__(self, senders: tuple[Place, ...], receivers: tuple[Place, ...], topology: Topology) -> None:
        self._topology = topology
        devices: dict[str, dict[str, int]] = {}
        for place in (*senders, *receivers):
            devices.setdefault(place.node, {}).setdefault(place.device, 0)
        self.nodes = tuple(devices)
        self._device, self._nic = dict[tuple[str, str], int](), list[int]()
        for node, own in enumerate(devices.values()):
            for position, device in enumerate(sorted(own, key=lambda name: (len(name), name))):
                self._device[self.nodes[node], device] = len(self._nic)
                self._nic.append(node * topology.nics_per_node + position % topology.nics_per_node)
        self._of_sender, self._of_receiver = (
            np.array([self._device[place.node, place.device] for place in places], dtype=np.int64)
            for places in (senders, receivers)
        )
        self._num_devices, self._num_nics = len(self._nic), len(self.nodes) * topology.nics_per_node
        self.num_ports = 3 * self._num_devices + 2 * self._num_nics

    @property
    def is_receiving(self) -> NDArray[np.bool_]:
        """[num_ports] bool: the ports through which a destination takes bytes in."""
        kind = np.repeat([True, False, True, False, True], [self._num_devices] * 3 + [self._num_nics] * 2)
        return kind

    def busy_seconds(self, traffic: Traffic, num_steps: int, message_s: float = 0.0) -> Seconds:
        """Return [num_ports, num_steps]: how long each port is busy in each step.

        Args:
            message_s: Fixed cost of each entry of `traffic`.
        """
        rates = np.array([self._topology.gb_per_s(link) for link in LinkClass]) * 1e9
        seconds = traffic.num_bytes / rates[traffic.link] + message_s
        busy = np.zeros(self.num_ports * num_steps)
        for port in self._ports_of(traffic):
            busy += np.bincount(port * num_steps + traffic.step, weights=seconds, minlength=len(busy))
        busy[: self._num_devices * num_steps] /= 2  # the port into a device's memory is both ends of its traffic
        return busy.reshape(self.num_ports, num_steps)

    def nic_bytes(self, traffic: Traffic) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Return the bytes out of and into each NIC of each node."""
        remote = traffic.link == LinkClass.NETWORK
        nics = np.array(self._nic, dtype=np.int64)
        sides = []
        for device in (self._of_sender[traffic.source], self._of_receiver[traffic.destination]):
            total = np.bincount(nics[device[remote]], weights=traffic.num_bytes[remote], minlength=self._num_nics)
            per_node = total.reshape(len(self.nodes), -1).astype(np.int64).tolist()
            sides.append({node: tuple(own) for node, own in zip(self.nodes, per_node, strict=True)})
        return sides[0], sides[1]

    def _ports_of(self, traffic: Traffic) -> tuple[IntArray, IntArray]:
        """Return the sending and the receiving port of each entry."""
        nics, d, n = np.array(self._nic, dtype=np.int64), self._num_devices, self._num_nics
        source, destination = self._of_sender[traffic.source], self._of_receiver[traffic.destination]
        out = np.stack([source, d + source, 3 * d + nics[source]])
        into = np.stack([destination, 2 * d + destination, 3 * d + n + nics[destination]])
        entry = np.arange(len(traffic.link))
        return out[traffic.link, entry], into[traffic.link, entry]
