"""Which roles a run has, where they are, and what they take from the actor."""

from __future__ import annotations

from hybridrl.config.algorithm import AdvantageConfig, AlgorithmConfig, RewardKlConfig
from hybridrl.config.choices import AdvantageEstimator
from hybridrl.config.schema import (
    ActorConfig,
    CriticConfig,
    ExperimentConfig,
    ModelConfig,
    ParallelConfig,
    PlacementConfig,
    RoleParallelConfig,
)
from hybridrl.layout.parallel import role_parallel
from hybridrl.layout.roles import ModelRole, by_pool, megatron_roles

ACTOR = ParallelConfig(tp_size=2, pp_size=2, ep_size=2, vpp_size=2, num_layers_in_first_pipeline_stage=1)


def test_degrees_of_its_own_replace_those_of_the_actor_one_by_one() -> None:
    assert role_parallel(RoleParallelConfig(), ACTOR) == ACTOR
    changed = role_parallel(RoleParallelConfig(tp_size=1, dp_size=3), ACTOR)
    assert (changed.tp_size, changed.dp_size, changed.pp_size, changed.vpp_size) == (1, 3, 2, 2)


def test_a_pipeline_of_its_own_takes_no_chunks_or_stages_of_the_actor() -> None:
    own = role_parallel(RoleParallelConfig(pp_size=4, pipeline_layout="E|t|tt|L"), ACTOR)
    assert own == ParallelConfig(tp_size=2, pp_size=4, ep_size=2, pipeline_layout="E|t|tt|L")


def test_the_algorithm_brings_in_the_roles_and_the_placement_groups_them() -> None:
    plain = ExperimentConfig(model=ModelConfig(path="policy"))
    assert [placed.role for placed in megatron_roles(plain)] == [ModelRole.ACTOR]
    config = ExperimentConfig(
        model=ModelConfig(path="policy"),
        actor=ActorConfig(parallel=ACTOR),
        critic=CriticConfig(model_path="other", micro_batch_tokens=77),
        placement=PlacementConfig(critic="side"),
        algorithm=AlgorithmConfig(
            advantage=AdvantageConfig(estimator=AdvantageEstimator.GAE), reward_kl=RewardKlConfig(coef=0.1)
        ),
    )
    pools = by_pool(megatron_roles(config))
    assert {name: [placed.role.value for placed in members] for name, members in pools.items()} == {
        "train": ["actor", "reference"],
        "side": ["critic"],
    }
    (critic,) = pools["side"]
    assert (str(critic.folder), critic.micro_batch.tokens, critic.parallel) == ("other", 77, ACTOR)
    assert all(str(placed.folder) == "policy" for placed in pools["train"])


def test_an_estimator_of_ones_own_says_whether_it_needs_values() -> None:
    own = AdvantageConfig(estimator=AdvantageEstimator.GAE, path="mine.py", name="mine")
    assert not AlgorithmConfig(advantage=own).needs_values
    own.needs_values = True
    assert AlgorithmConfig(advantage=own).needs_values
