"""The links between ranks and what they carry: the model with which a plan is priced before anything is allocated."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class LinkClass(enum.IntEnum):
    """What a move crosses; the values are ordered from near to far."""

    DEVICE = 0  # within the memory of one device: no wire
    NODE = 1  # between devices of one node: NVLink, PCIe or shared memory
    NETWORK = 2  # between nodes, through the NICs of both


@dataclass(frozen=True, slots=True)
class Topology:
    """Rates of a cluster of equal nodes; every rate is per direction.

    Attributes:
        device_gb_per_s: A device's copy within its own memory, read and write counted once.
        node_gb_per_s: What one device can send, and at the same time receive, inside its node.
        nic_gb_per_s: What one NIC can send, and at the same time receive.
        nics_per_node: NICs of a node; its devices use them in turn, device 0 the first.
        message_s: Fixed cost of a message at each of its two ends.
    """

    name: str
    device_gb_per_s: float
    node_gb_per_s: float
    nic_gb_per_s: float
    nics_per_node: int
    message_s: float

    def gb_per_s(self, link: LinkClass) -> float:
        """Return the rate of one port."""
        return (self.device_gb_per_s, self.node_gb_per_s, self.nic_gb_per_s)[link]


# Rates are about 80 % of the hardware's: NVLink 4 carries 450 GB/s per direction, a 400 Gb/s NIC 50 GB/s.
H100_CLUSTER = Topology(
    "8 x H100, NVLink 4, 8 x 400 Gb/s",
    device_gb_per_s=1300.0,
    node_gb_per_s=360.0,
    nic_gb_per_s=40.0,
    nics_per_node=8,
    message_s=20e-6,
)
CPU_HOSTS = Topology(
    "CPU hosts, shared memory, 10 Gb/s",
    device_gb_per_s=5.0,
    node_gb_per_s=2.5,
    nic_gb_per_s=1.0,
    nics_per_node=1,
    message_s=100e-6,
)
