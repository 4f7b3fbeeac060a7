"""Brings roles up and takes them down: placement, concurrent start, connection for weight sync, and a clean end."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.schema import ExperimentConfig, ModelInit, RouterReplay
from hybridrl.controller.connection import Connector
from hybridrl.controller.probe import make_probe
from hybridrl.controller.weight_sync import WeightSyncer
from hybridrl.layout.cost import sequence_cost
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.parallel import ParallelSizes, parallel_sizes
from hybridrl.layout.shard import ShardMap
from hybridrl.reshard.transports import remove_leftovers
from hybridrl.roles.deadline import inner_s
from hybridrl.roles.future import wait_for, wait_for_both
from hybridrl.roles.group import Observe
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

    def observe(self, observe: Observe) -> None:
        """Tell of every answer of a rank or replica from now on."""
        self.actor.observe(observe)
        self.rollout.observe(observe)


@contextmanager
def start_roles(config: ExperimentConfig, run_dir: Path, probe_token_ids: Sequence[int]) -> Iterator[Roles]:
    """Start training ranks and replicas at the same time and connect them; end them all with the context.

    Args:
        run_dir: Gets the logs of worker processes after an error.
        probe_token_ids: Of the probe prompt (``probe.py``).

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
            yield Roles(
                actor, rollout, connect(actor, rollout, actor_maps, rollout_maps, config, session, probe_token_ids)
            )
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
    config: ExperimentConfig,
    session: str,
    probe_token_ids: Sequence[int],
) -> WeightSyncer:
    """Plan the weight sync and connect both roles to the plan.

    Args:
        session: From :func:`sync_session`.
        probe_token_ids: Of the probe prompt (``probe.py``).

    Raises:
        ReshardError: No plan exists; names the parameter and the range.
        EngineError: A rank could not connect.
    """
    sync = config.weight_sync
    precisions = (config.model.precision, config.rollout.precision)
    probe = make_probe(probe_token_ids, sync.probe_tolerance, precisions, config.rollout.max_model_tokens)
    connector = Connector(actor, rollout, actor_maps, sync, config.platform, session)
    syncer = WeightSyncer(actor, rollout, connector, sync, probe)
    syncer.connect(rollout_maps)
    return syncer


def _model_folder(config: ExperimentConfig) -> Path:
    """Return the model's folder as every process can find it, whatever its working directory."""
    return Path(config.model.path).absolute()


def _rollout(config: ExperimentConfig, placed: RolePlacement, pools: Sequence[ResourcePool]) -> RolloutReplicas:
    launch = RolloutLaunch(
        _model_folder(config),
        config.rollout,
        config.platform,
        config.data.task,
        config.seed,
        records_routing=config.actor.router_replay is RouterReplay.R3,
    )
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
        has_reference=algorithm.needs_reference,
        num_optimizer_steps=num_updates,
        timeout_s=inner_s(config.trainer.train_timeout_s),
        replays_routing=config.actor.router_replay is not RouterReplay.OFF,
    )
    return MegatronGroup(
        pools[placed.actor[0].pool],
        placed.actor,
        sizes,
        launch,
        temperature=config.rollout.temperature,
        loss=algorithm.policy_loss,
        cost=sequence_cost(read_model_spec(launch.folder)),
        timeouts=config.trainer,
    )
