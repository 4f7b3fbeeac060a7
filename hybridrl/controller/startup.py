"""Brings roles up and takes them down: placement, concurrent start, connection for weight sync, and a clean end."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hybridrl.config.choices import RouterReplay
from hybridrl.config.schema import ExperimentConfig
from hybridrl.controller.connection import Connector
from hybridrl.controller.hang_watch import HangWatch
from hybridrl.controller.launches import megatron_launch, place_pools
from hybridrl.controller.probe import make_probe
from hybridrl.controller.profiles import profile_launch
from hybridrl.controller.weight_sync import WeightSyncer
from hybridrl.engines.profiler import ProfileLaunch
from hybridrl.layout.cost import SequenceCost, sequence_cost
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.roles import ModelRole, PlacedRole, by_pool, megatron_roles
from hybridrl.layout.shard import ShardMap
from hybridrl.layout.value_model import read_value_model_spec
from hybridrl.reshard.transports import remove_leftovers
from hybridrl.roles.future import wait_all, wait_for
from hybridrl.roles.megatron_policy import MegatronActor, MegatronPolicy
from hybridrl.roles.megatron_pool import MegatronPool
from hybridrl.roles.megatron_state import MegatronState
from hybridrl.roles.megatron_value import MegatronCritic, MegatronRewardModel
from hybridrl.roles.placement import PoolPlacement
from hybridrl.roles.resources import Cluster, ResourcePool
from hybridrl.roles.rollout_group import RolloutReplicas
from hybridrl.roles.rollout_replica import RolloutLaunch

_LOGS_FOLDER = "logs"


@dataclass(frozen=True, slots=True)
class MegatronModels:
    """Megatron models that are up, each where it was placed; None where no role needs one.

    Attributes:
        states: Of the models that are trained, the actor first.
    """

    actor: MegatronActor
    reference: MegatronPolicy | None
    critic: MegatronCritic | None
    reward_model: MegatronRewardModel | None
    states: tuple[MegatronState, ...]


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles that are up; actor and replicas hold the same weights as version 0 and are connected.

    Attributes:
        processes: All of them, each once.
    """

    models: MegatronModels
    rollout: RolloutReplicas
    weight_sync: WeightSyncer
    processes: tuple[MegatronPool | RolloutReplicas, ...]


@contextmanager
def start_roles(
    config: ExperimentConfig,
    run_dir: Path,
    probe_token_ids: Sequence[int],
    watch: HangWatch,
) -> Iterator[Roles]:
    """Start Megatron ranks and replicas at the same time and connect them; end them all with the context.

    Args:
        run_dir: Gets the logs of worker processes after an error.
        probe_token_ids: Of the probe prompt (``probe.py``).
        watch: Raises its verdict out of the context, and knows the calls.

    Raises:
        EngineError: A rank did not start; names role, rank and phase.
        HangError: See :class:`HangWatch`.
    """
    roles = megatron_roles(config)
    placed = place_pools(config, roles, config.rollout.num_replicas)
    with sync_session() as session, _pools(config, placed, run_dir, watch) as pools:
        name, profile = config.placement.rollout, profile_launch(config.profile, run_dir)
        rollout = _rollout(config, placed[name], pools[name], watch, profile)
        num_steps = config.trainer.num_steps - (config.critic.warmup_steps if config.algorithm.needs_values else 0)
        num_updates = num_steps * config.algorithm.updates_per_step
        ranks = _megatron_pools(config, roles, placed, pools, num_updates, watch, profile)
        try:
            with watch.raised():
                rollout_maps = rollout.start()
                wait_all([*[pool.start() for pool in ranks.values()], rollout_maps])
                models = _models(config, roles, ranks)
                maps = wait_for(models.actor.shard_maps()), rollout_maps.value()
                syncer = connect(models.actor, rollout, *maps, config, session, probe_token_ids)
                yield Roles(models, rollout, syncer, (*ranks.values(), rollout))
        finally:
            rollout.close()
            for pool in ranks.values():
                pool.close()


@contextmanager
def start_actor(config: ExperimentConfig, num_updates: int, run_dir: Path, watch: HangWatch) -> Iterator[MegatronActor]:
    """Start the actor alone; end it with the context.

    Args:
        num_updates: Optimizer steps of the whole run.
        run_dir: As in :func:`start_roles`.
        watch: As there.

    Raises:
        EngineError: A rank did not start; names role, rank and phase.
        HangError: See :class:`HangWatch`.
    """
    roles = megatron_roles(config)[:1]
    placed = place_pools(config, roles, num_replicas=0)
    with _pools(config, placed, run_dir, watch) as pools:
        ranks = _megatron_pools(config, roles, placed, pools, num_updates, watch)
        (pool,) = ranks.values()
        try:
            with watch.raised():
                wait_for(pool.start())
                yield _models(config, roles, ranks).actor
        finally:
            pool.close()


@contextmanager
def sync_session() -> Iterator[str]:
    """Name one connection; afterwards, remove what ranks that died while they connected left on this host."""
    session = uuid.uuid4().hex[:12]
    try:
        yield session
    finally:
        remove_leftovers(session)


def connect(
    actor: MegatronActor,
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


@contextmanager
def _pools(
    config: ExperimentConfig, placed: Mapping[str, PoolPlacement], run_dir: Path, watch: HangWatch
) -> Iterator[dict[str, ResourcePool]]:
    """Connect to Ray, reserve all pools and watch their nodes."""
    num_cpus = sum(pool.num_cpus for pool in placed.values())
    with Cluster(config.ray_address, num_cpus, run_dir / _LOGS_FOLDER) as cluster:
        timeout_s = config.trainer.startup_timeout_s
        pools = {name: cluster.pool(pool.bundles, timeout_s) for name, pool in placed.items()}
        with watch.nodes.reaching([node for pool in pools.values() for node in pool.nodes]):
            yield pools


def _rollout(
    config: ExperimentConfig,
    placed: PoolPlacement,
    pool: ResourcePool,
    watch: HangWatch,
    profile: ProfileLaunch | None,
) -> RolloutReplicas:
    launch = RolloutLaunch(
        Path(config.model.path).absolute(),
        config.rollout,
        config.platform,
        config.data.task,
        config.seed,
        records_routing=config.actor.router_replay is RouterReplay.R3,
        session=watch.session,
        profile=profile,
    )
    return RolloutReplicas(pool, placed.replicas, launch, timeouts=config.trainer, calls=watch.calls)


def _megatron_pools(
    config: ExperimentConfig,
    roles: Sequence[PlacedRole],
    placed: Mapping[str, PoolPlacement],
    pools: Mapping[str, ResourcePool],
    num_updates: int,
    watch: HangWatch,
    profile: ProfileLaunch | None = None,
) -> dict[str, MegatronPool]:
    """Start the processes of all pools at once, which takes seconds for each."""
    return {
        name: MegatronPool(
            pools[name],
            placed[name].ranks,
            replace(megatron_launch(config, members, num_updates), session=watch.session, profile=profile),
            timeouts=config.trainer,
            calls=watch.calls,
        )
        for name, members in by_pool(roles).items()
    }


def _models(config: ExperimentConfig, roles: Sequence[PlacedRole], pools: Mapping[str, MegatronPool]) -> MegatronModels:
    temperature = config.rollout.temperature
    actor, reference, critic, reward_model = ({each.role: each for each in roles}.get(role) for role in ModelRole)
    assert actor is not None, roles
    return MegatronModels(
        actor=MegatronActor(
            pools[actor.pool], _cost(actor), temperature=temperature, loss=config.algorithm.policy_loss
        ),
        reference=MegatronPolicy(pools[reference.pool], ModelRole.REFERENCE, _cost(reference), temperature=temperature)
        if reference
        else None,
        critic=MegatronCritic(pools[critic.pool], _cost(critic), clip_value=config.critic.clip_value)
        if critic
        else None,
        reward_model=MegatronRewardModel(pools[reward_model.pool], _cost(reward_model)) if reward_model else None,
        states=tuple(MegatronState(pools[each.pool], each.role) for each in (actor, critic) if each),
    )


def _cost(placed: PlacedRole) -> SequenceCost:
    read = read_value_model_spec if placed.role.has_values else read_model_spec
    return sequence_cost(read(placed.folder))
