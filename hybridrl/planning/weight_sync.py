"""The weight sync of a run: planned as the run plans it, priced on the cluster.

Experts that every rank holds together are planned as one, a *bundle*: both sides cut it as they cut each of them, so each rank
receives the same bytes over the same links. Only the predicted seconds can differ a little, since a destination that begins in the
middle of a layer cannot begin inside a bundle.

Worked example: 256 experts on 8 expert-parallel ranks, each cut 16 ways for generation. 32 experts in a row are one bundle; the
plan of 512 ranks has 0.6 million moves instead of 13 million.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from hybridrl.config.schema import ExperimentConfig, Platform, TransportName
from hybridrl.layout.mlp import ExpertStorage
from hybridrl.layout.model import DecoderLayer, ModelSpec, MoeMlp
from hybridrl.layout.shard import CanonicalTensor, Place
from hybridrl.planning.cluster import Cluster
from hybridrl.planning.layouts import are_devices_shared, generation_layout, training_layout
from hybridrl.reshard.bound import lower_bound_bytes
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.pricing import PlanPrice, price_plan
from hybridrl.reshard.table import ShardTable, shard_tables
from hybridrl.reshard.transport_choice import choose_transport
from hybridrl.reshard.worlds import Devices, megatron_world, vllm_world

# Moves of a plan that take about a second.
_MOST_MOVES = 400_000


@dataclass(frozen=True, slots=True)
class ExpertBundles(MoeMlp):
    """A mixture in which several experts in a row count as one; its router still has a row for each expert."""

    bundle: int = 1

    def tensors(self) -> Iterator[CanonicalTensor]:
        """Yield the tensors of the checkpoint, experts in bundles."""
        of_router = (self.router, self.router_bias, self.correction_bias)
        for tensor in MoeMlp.tensors(self):
            is_router = tensor.name in of_router
            rows = tensor.shape[0] * (self.bundle if is_router else 1)
            yield replace(tensor, shape=(rows, *tensor.shape[1:])) if is_router else tensor


@dataclass(frozen=True, slots=True)
class SyncEstimate:
    """What a weight sync costs.

    Attributes:
        transport: That the run will use.
        bundle: Experts that were planned as one.
    """

    price: PlanPrice
    transport: str
    bundle: int


def plan_weight_sync(config: ExperimentConfig, spec: ModelSpec, cluster: Cluster) -> SyncEstimate:
    """Plan and price the sync from the actor to all replicas.

    Raises:
        LayoutError: When a size does not divide.
    """
    bundle = expert_bundle(config, spec)
    sources, destinations = _tables(config, bundled(spec, bundle), cluster)
    transport = _transport([t.place for t in sources], [t.place for t in destinations], config)
    plan = Planner(
        sources,
        destinations,
        chunk_bytes=config.weight_sync.chunk_mib << 20,
        is_staggered=config.rollout.num_replicas > 1,
        is_shared=transport == TransportName.MIXED.value,
    ).moves_only()
    price = price_plan(plan, cluster.topology, lower_bound_bytes(sources, destinations))
    return SyncEstimate(price, transport, bundle)


def expert_bundle(config: ExperimentConfig, spec: ModelSpec) -> int:
    """Return how many experts to plan as one: as few as keep the plan small."""
    experts = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeMlp)]
    if not experts or experts[0].storage is ExpertStorage.STACKED:
        return 1
    together = math.gcd(*(mlp.num_experts for mlp in experts)) // config.actor.parallel.ep_size
    workers = config.rollout.num_replicas * config.rollout.tp_size
    num_moves = 3 * workers * sum(mlp.num_experts for mlp in experts)
    fitting = (size for size in range(1, together) if together % size == 0 and num_moves / size <= _MOST_MOVES)
    return next(fitting, together)


def bundled(spec: ModelSpec, bundle: int) -> ModelSpec:
    """Return a model whose experts are in bundles of so many."""
    return spec if bundle == 1 else replace(spec, layers=tuple(_bundled_layer(layer, bundle) for layer in spec.layers))


def _bundled_layer(layer: DecoderLayer, bundle: int) -> DecoderLayer:
    mlp = layer.mlp
    if not isinstance(mlp, MoeMlp):
        return layer
    values = {field.name: getattr(mlp, field.name) for field in fields(MoeMlp)}
    values["num_experts"] //= bundle
    values["intermediate_size"] *= bundle
    return replace(layer, mlp=ExpertBundles(**values, bundle=bundle))


def _tables(
    config: ExperimentConfig, spec: ModelSpec, cluster: Cluster
) -> tuple[list[ShardTable], list[ShardTable]]:
    training, per_node = training_layout(config, spec), cluster.devices_per_node
    first = 0 if are_devices_shared(config) else training.sizes.world_size
    replicas = vllm_world(generation_layout(config, spec), config.rollout.num_replicas, Devices(per_node, first))
    return shard_tables(megatron_world(training, Devices(per_node))), shard_tables(replicas)


def _transport(sources: list[Place], destinations: list[Place], config: ExperimentConfig) -> str:
    wanted = config.weight_sync.transport
    if wanted is not TransportName.AUTO:
        return wanted.value
    return choose_transport(sources, destinations, is_cuda=config.platform is Platform.CUDA)
