"""Brings roles up and takes them down: placement, concurrent start, connection for weight sync, and a clean end."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hybridrl.algos.policy_loss import PolicyLossConfig
from hybridrl.config.schema import ExperimentConfig, ModelInit, TransportName, WeightSyncConfig
from hybridrl.controller.weight_sync import WeightSyncer
from hybridrl.errors import EngineError
from hybridrl.layout.cost import sequence_cost
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.parallel import ParallelSizes, parallel_sizes
from hybridrl.layout.shard import ShardMap
from hybridrl.reshard.planner import build_plan, lower_bound_bytes
from hybridrl.reshard.transports import Rendezvous, remove_leftovers
from hybridrl.roles.deadline import inner_s
from hybridrl.roles.future import wait_for, wait_for_both
from hybridrl.roles.megatron_group import MegatronGroup
from hybridrl.roles.megatron_worker import MegatronLaunch
from hybridrl.roles.placement import RolePlacement, place_roles
from hybridrl.roles.resources import Cluster, ResourcePool
from hybridrl.roles.rollout_group import RolloutReplicas
from hybridrl.roles.rollout_replica import RolloutLaunch

_LOGS_FOLDER = "logs"


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles that are up, hold the same weights as version 0, and are connected."""

    actor: MegatronGroup
    rollout: RolloutReplicas
    weight_sync: WeightSyncer


@contextmanager
def start_roles(config: ExperimentConfig, run_dir: Path) -> Iterator[Roles]:
    """Start training ranks and replicas at the same time and connect them; end them all with the context.

    Args:
        run_dir: Gets the logs of worker processes after an error.

    Raises:
        EngineError: A rank did not start; names role, rank and phase.
    """
    sizes = parallel_sizes(config.actor.parallel)
    placed = place_roles(
        config.platform, config.placement, sizes.world_size, config.rollout.num_replicas, config.rollout.tp_size
    )
    with sync_session() as session, Cluster(config.ray_address, placed.num_cpus, run_dir / _LOGS_FOLDER) as cluster:
        pools = [cluster.pool(bundles, config.trainer.startup_timeout_s) for bundles in placed.pools]
        rollout = _rollout(config, placed, pools)
        num_updates = config.trainer.num_steps * config.algorithm.mini_batches_per_step
        actor = _actor(config, sizes, placed, pools, num_updates)
        try:
            rollout_maps_pending = rollout.start()
            actor_maps, rollout_maps = wait_for_both(actor.start(), rollout_maps_pending)
            yield Roles(actor, rollout, connect(actor, rollout, actor_maps, rollout_maps, config.weight_sync, session))
        finally:
            rollout.close()
            actor.close()


@contextmanager
def start_actor(config: ExperimentConfig, num_updates: int, run_dir: Path) -> Iterator[MegatronGroup]:
    """Start the training role alone; end it with the context.

    Args:
        num_updates: Optimizer steps of the whole run.
        run_dir: As in :func:`start_roles`.

    Raises:
        EngineError: A rank did not start; names role, rank and phase.
    """
    sizes = parallel_sizes(config.actor.parallel)
    placed = place_roles(config.platform, config.placement, sizes.world_size, 0, 1)
    with Cluster(config.ray_address, placed.num_cpus, run_dir / _LOGS_FOLDER) as cluster:
        pools = [cluster.pool(bundles, config.trainer.startup_timeout_s) for bundles in placed.pools if bundles]
        actor = _actor(config, sizes, placed, pools, num_updates)
        try:
            wait_for(actor.start())
            yield actor
        finally:
            actor.close()


@contextmanager
def sync_session() -> Iterator[str]:
    """Name one connection; afterwards, remove what ranks that died while they connected left on this host."""
    session = uuid.uuid4().hex[:12]
    try:
        yield session
    finally:
        remove_leftovers(session)


def connect(
    actor: MegatronGroup,
    rollout: RolloutReplicas,
    actor_maps: Sequence[ShardMap],
    rollout_maps: Sequence[ShardMap],
    config: WeightSyncConfig,
    session: str,
) -> WeightSyncer:
    """Plan the weight sync and connect both roles to the plan.

    Args:
        session: From :func:`sync_session`.

    Raises:
        ReshardError: No plan exists; names the parameter and the range.
        EngineError: A rank could not connect.
    """
    plan = build_plan(actor_maps, rollout_maps, chunk_bytes=config.chunk_mib << 20)
    host, port = actor.rendezvous()
    kind = _transport([*actor_maps, *rollout_maps], config.transport)
    rendezvous = Rendezvous(kind.value, session, host, port, inner_s(config.timeout_s))
    wait_for_both(
        actor.connect_sync(rendezvous, plan, verify=config.verify, timeout_s=config.timeout_s),
        rollout.connect_sync(rendezvous, plan, timeout_s=config.timeout_s),
    )
    return WeightSyncer(actor, rollout, plan, lower_bound_bytes(actor_maps, rollout_maps), config)


def _transport(maps: Sequence[ShardMap], wanted: TransportName) -> TransportName:
    nodes = {shard_map.place.node for shard_map in maps}
    if wanted is TransportName.SHM and len(nodes) > 1:
        raise EngineError(
            f"weight_sync.transport: shm, but actor and rollout run on {len(nodes)} nodes, which share no memory; use auto or "
            "gloo, or ask for no more than one node has"
        )
    if wanted is not TransportName.AUTO:
        return wanted
    return TransportName.SHM if len(nodes) == 1 else TransportName.GLOO


def _model_folder(config: ExperimentConfig) -> Path:
    """Return the model's folder as every process can find it, whatever its working directory."""
    return Path(config.model.path).absolute()


def _rollout(config: ExperimentConfig, placed: RolePlacement, pools: Sequence[ResourcePool]) -> RolloutReplicas:
    launch = RolloutLaunch(_model_folder(config), config.rollout, config.platform, config.data.task, config.seed)
    return RolloutReplicas(pools[placed.rollout[0].pool], placed.rollout, launch, timeouts=config.trainer)


def _actor(
    config: ExperimentConfig,
    sizes: ParallelSizes,
    placed: RolePlacement,
    pools: Sequence[ResourcePool],
    num_updates: int,
) -> MegatronGroup:
    algorithm = config.algorithm
    launch = MegatronLaunch(
        folder=_model_folder(config),
        is_pretrained=config.model.init is ModelInit.PRETRAINED,
        actor=config.actor,
        precision=config.model.precision,
        platform=config.platform,
        seed=config.seed,
        has_reference=algorithm.kl_coef > 0,
        num_optimizer_steps=num_updates,
        timeout_s=inner_s(config.trainer.train_timeout_s),
    )
    loss = PolicyLossConfig(algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef, algorithm.entropy_coef)
    return MegatronGroup(
        pools[placed.actor[0].pool],
        placed.actor,
        sizes,
        launch,
        temperature=config.rollout.temperature,
        loss=loss,
        cost=sequence_cost(read_model_spec(launch.folder)),
        timeouts=config.trainer,
    )
