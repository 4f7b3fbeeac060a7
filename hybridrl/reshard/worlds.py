"""Shard maps of whole worlds, declared without a process: what is planned and priced before anything starts.

Ranks that hold the same weights share one declaration, and the planner looks at it only once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridrl.layout.megatron import MegatronLayout, megatron_shard_map
from hybridrl.layout.shard import Place, ShardMap
from hybridrl.layout.vllm import VllmLayout, vllm_shard_map


@dataclass(frozen=True, slots=True)
class Devices:
    """Consecutive devices of equal nodes.

    Attributes:
        first: Device of rank 0, counted through all nodes.
    """

    per_node: int
    first: int = 0

    def place(self, role: str, rank: int) -> Place:
        """Return where a rank is."""
        device = self.first + rank
        return Place(role, rank, f"node{device // self.per_node}", str(device % self.per_node))


def megatron_world(layout: MegatronLayout, devices: Devices, role: str = "actor") -> list[ShardMap]:
    """Declare the maps of all training ranks.

    Raises:
        LayoutError: When a size does not divide.
    """
    known: dict[tuple[int, ...], ShardMap] = {}
    maps = []
    for rank in range(layout.sizes.world_size):
        at, place = layout.sizes.coordinates(rank), devices.place(role, rank)
        key = (at.tp, at.pp, at.etp, at.ep)
        if key not in known:
            known[key] = megatron_shard_map(layout, place)
        maps.append(replace(known[key], place=place))
    return maps


def vllm_world(layout: VllmLayout, num_replicas: int, devices: Devices, role: str = "rollout") -> list[ShardMap]:
    """Declare the maps of all workers of `num_replicas` replicas, numbered with tp fastest, then pp, then dp.

    Raises:
        LayoutError: When a size does not divide.
    """
    replica = [
        vllm_shard_map(layout, tp, devices.place(role, 0), pp_rank=pp, dp_rank=dp)
        for dp in range(layout.dp)
        for pp in range(layout.pp)
        for tp in range(layout.tp)
    ]
    ranks = range(num_replicas * len(replica))
    return [replace(replica[rank % len(replica)], place=devices.place(role, rank)) for rank in ranks]
