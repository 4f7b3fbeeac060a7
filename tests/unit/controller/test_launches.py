"""Pools and launches of a run, from its configuration alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hybridrl.config.algorithm import AdvantageConfig, AlgorithmConfig, PolicyLossConfig
from hybridrl.config.choices import AdvantageEstimator, Platform, ProfileTool, TaskName
from hybridrl.config.schema import (
    CriticConfig,
    ExperimentConfig,
    ModelConfig,
    OptimizerConfig,
    PlacementConfig,
    RoleConfig,
    RoleParallelConfig,
    RolloutConfig,
)
from hybridrl.config.step_list import parse_steps
from hybridrl.controller.launches import megatron_launch, place_pools
from hybridrl.engines.profiler import ProfileLaunch
from hybridrl.layout.roles import ModelRole, by_pool, megatron_roles
from hybridrl.roles.rollout_replica import RolloutLaunch

PPO = ExperimentConfig(
    platform=Platform.CPU,
    model=ModelConfig(path="policy"),
    algorithm=AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.GAE),
        policy_loss=PolicyLossConfig(kl_coef=0.1),
        mini_batches_per_step=2,
    ),
    critic=CriticConfig(optimizer=OptimizerConfig(lr=0.5), warmup_steps=3),
)


def test_roles_of_one_pool_share_its_ranks_and_replicas_come_after() -> None:
    pools = place_pools(PPO, megatron_roles(PPO), num_replicas=2)
    assert list(pools) == ["train"]
    assert len(pools["train"].ranks) == 1 and [slot.bundle for slot in pools["train"].replicas] == [1, 2]


def test_each_named_pool_is_as_large_as_its_roles() -> None:
    placement = PlacementConfig(critic="side", reference="side", rollout="rollout")
    wide = RoleParallelConfig(dp_size=3)
    config = replace(PPO, placement=placement, critic=CriticConfig(parallel=wide), reference=RoleConfig(parallel=wide))
    pools = place_pools(config, megatron_roles(config), num_replicas=1)
    assert {name: (len(pool.ranks), len(pool.replicas)) for name, pool in pools.items()} == {
        "train": (1, 0),
        "side": (3, 0),
        "rollout": (0, 1),
    }


def test_only_trained_models_get_an_optimizer_and_the_critic_its_own() -> None:
    ((_, members),) = by_pool(megatron_roles(PPO)).items()
    launch = megatron_launch(PPO, members, num_updates=10)
    actor, reference, critic = launch.models
    assert [model.role for model in launch.models] == [ModelRole.ACTOR, ModelRole.REFERENCE, ModelRole.CRITIC]
    assert launch.roles == "actor+reference+critic"
    assert reference.optimizer is None and actor.optimizer == PPO.actor.optimizer
    assert critic.optimizer is not None and critic.optimizer.lr == 0.5
    # The critic also learns in 3 steps of 2 mini-batches before the actor does.
    assert (actor.num_optimizer_steps, critic.num_optimizer_steps) == (10, 16)


def test_only_profiled_ranks_start_under_nsight(tmp_path: Path) -> None:
    profile = ProfileLaunch(ProfileTool.NSYS, tmp_path, ("actor", "critic", "rollout"), parse_steps("1"))
    ((_, members),) = by_pool(megatron_roles(PPO)).items()
    launch = replace(megatron_launch(PPO, members, num_updates=10), profile=profile)
    assert launch.python(0) is None and f"--output={tmp_path}/actor+critic_rank_00001 " in (launch.python(1) or "")
    replicas = RolloutLaunch(tmp_path, RolloutConfig(tp_size=2), Platform.CUDA, TaskName.CALC, 1, profile=profile)
    assert f"--output={tmp_path}/rollout_replica_00000 " in (replicas.python(0) or "") and replicas.python(1) is None
