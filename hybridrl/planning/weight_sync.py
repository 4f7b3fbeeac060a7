"""The weight sync of a run: planned as the run plans it, priced on the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.choices import Platform, TransportName
from hybridrl.config.schema import ExperimentConfig
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.roles import megatron_roles
from hybridrl.layout.shard import Place
from hybridrl.planning.cluster import Cluster
from hybridrl.planning.layouts import generation_layout, role_layout
from hybridrl.planning.pools import pool_of_actor, pool_of_rollout
from hybridrl.reshard.bound import lower_bound_bytes
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.pricing import PlanPrice, price_plan
from hybridrl.reshard.table import ShardTable, shard_tables
from hybridrl.reshard.transport_choice import choose_transport
from hybridrl.reshard.worlds import Devices, megatron_world, vllm_world


@dataclass(frozen=True, slots=True)
class SyncEstimate:
    """What a weight sync costs.

    Attributes:
        transport: That the run will use.
    """

    price: PlanPrice
    transport: str


def plan_weight_sync(config: ExperimentConfig, spec: ModelSpec, cluster: Cluster) -> SyncEstimate:
    """Plan and price the sync from the actor to all replicas.

    Args:
        spec: Of a large mixture with its experts in bundles (``bundles.py``).

    Raises:
        LayoutError: When a size does not divide.
    """
    sources, destinations = _tables(config, spec, cluster)
    transport = _transport([t.place for t in sources], [t.place for t in destinations], config)
    plan = Planner(
        sources,
        destinations,
        chunk_bytes=config.weight_sync.chunk_mib << 20,
        is_staggered=config.rollout.num_replicas > 1,
        is_shared=transport == TransportName.MIXED.value,
    ).moves_only()
    price = price_plan(plan, cluster.topology, lower_bound_bytes(sources, destinations))
    return SyncEstimate(price, transport)


def _tables(config: ExperimentConfig, spec: ModelSpec, cluster: Cluster) -> tuple[list[ShardTable], list[ShardTable]]:
    actor, per_node = megatron_roles(config)[0], cluster.devices_per_node
    ranks = Devices(per_node, pool_of_actor(config).first)
    workers = Devices(per_node, pool_of_rollout(config).first_worker)
    return (
        shard_tables(megatron_world(role_layout(config, actor, spec), ranks)),
        shard_tables(vllm_world(generation_layout(config, spec), config.rollout.num_replicas, workers)),
    )


def _transport(sources: list[Place], destinations: list[Place], config: ExperimentConfig) -> str:
    wanted = config.weight_sync.transport
    if wanted is not TransportName.AUTO:
        return str(wanted.value)
    return choose_transport(sources, destinations, is_cuda=config.platform is Platform.CUDA)
