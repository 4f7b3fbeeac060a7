"""What runs where: from the configuration to the pools of a run and the models of their ranks. No cluster needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridrl.config.choices import ModelInit, RouterReplay
from hybridrl.config.schema import ExperimentConfig
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.roles import ModelRole, PlacedRole, by_pool
from hybridrl.roles.deadline import inner_s
from hybridrl.roles.megatron_launch import MegatronLaunch, ModelLaunch
from hybridrl.roles.placement import PoolPlacement, place_pool


def place_pools(config: ExperimentConfig, roles: Sequence[PlacedRole], num_replicas: int) -> dict[str, PoolPlacement]:
    """Return every pool by name, that of the actor first.

    Args:
        num_replicas: Rollout replicas; 0 leaves that role out.

    Raises:
        EngineError: The processes of a pool cannot share its devices.
    """
    num_ranks = {name: parallel_sizes(members[0].parallel).world_size for name, members in by_pool(roles).items()}
    replicas = {config.placement.rollout: num_replicas} if num_replicas else {}
    return {
        name: place_pool(config.platform, num_ranks.get(name, 0), replicas.get(name, 0), config.rollout.tp_size)
        for name in dict.fromkeys([*num_ranks, *replicas])
    }


def megatron_launch(config: ExperimentConfig, members: Sequence[PlacedRole], num_updates: int) -> MegatronLaunch:
    """Return what the ranks of one pool start with.

    Args:
        members: The roles of the pool, which have one layout.
        num_updates: Optimizer steps of the actor in the whole run.
    """
    parallel = members[0].parallel
    assert all(member.parallel == parallel for member in members), members
    return MegatronLaunch(
        parallel=parallel,
        precision=config.model.precision,
        platform=config.platform,
        threads_per_rank=config.actor.threads_per_rank,
        seed=config.seed,
        timeout_s=inner_s(config.trainer.train_timeout_s),
        models=tuple(_model_launch(config, member, num_updates) for member in members),
    )


def _model_launch(config: ExperimentConfig, placed: PlacedRole, num_updates: int) -> ModelLaunch:
    actor, critic = config.actor, config.critic
    launch = ModelLaunch(
        placed.role,
        placed.folder.absolute(),
        config.model.init is ModelInit.PRETRAINED or placed.role is not ModelRole.ACTOR,
        placed.micro_batch,
        recompute=actor.recompute,
    )
    if placed.role is ModelRole.ACTOR:
        return replace(
            launch,
            optimizer=actor.optimizer,
            num_optimizer_steps=num_updates,
            moe=actor.moe,
            replays_routing=actor.router_replay is not RouterReplay.OFF,
        )
    if placed.role is ModelRole.CRITIC:
        alone = critic.warmup_steps * config.algorithm.updates_per_step
        return replace(launch, optimizer=critic.optimizer, num_optimizer_steps=num_updates + alone)
    return launch
