"""Seconds of a step: every phase from its own arithmetic, and what policy lag makes of them."""

from __future__ import annotations

import pytest

from hybridrl.planning.timing import MFU_BAND
from tests.unit.planning.recipes import CONFIGS, planned


def test_training_takes_its_operations_over_the_rate_of_its_ranks():
    plan = planned("qwen3-30b-a3b")
    timing, tokens = plan.timing, 1024 * 3200
    assert (timing.mfu.low, timing.mfu.high) == MFU_BAND and timing.bubble == 0
    seconds = tokens * timing.forward_flops_per_token / (8 * 989e12 * 0.3)
    assert timing.passes["old log-probs"].low == pytest.approx(seconds)
    assert timing.passes["update"].low == pytest.approx(4 * seconds)  # forward, backward, and forward again
    assert planned("qwen3-30b-a3b", "actor.recompute=none").timing.passes["update"].low == pytest.approx(3 * seconds)
    bypass = planned("qwen3-30b-a3b", "algorithm.rollout_correction.old_policy=bypass")
    assert list(bypass.timing.passes) == ["update"]


def test_a_pipeline_waits_at_both_ends_of_an_update():
    # 4096 samples of 4200 tokens on 16 data-parallel ranks are 117 micro-batches; 15 stages fill and drain.
    timing = planned("deepseek-v3").timing
    assert timing.bubble == pytest.approx(15 / (117 + 15))


def test_small_micro_batches_reach_less_of_the_peak():
    small = ("algorithm.prompts_per_step=1", "algorithm.samples_per_prompt=4", "plan.mean_response_tokens=824")
    assert planned("qwen3-30b-a3b", *small).timing.mfu.high == pytest.approx(0.30 * 1024 / 4096)


def test_rollouts_take_full_waves_and_never_less_than_the_longest_sample():
    plan = planned("qwen3-30b-a3b")
    step = plan.timing.decode
    assert (step.num_samples, step.context_tokens) == (256, 200 + 1500)
    assert plan.timing.rollout.low == pytest.approx(3000 * step.seconds[1], rel=0.02)
    halved = planned("qwen3-30b-a3b", "rollout.max_running_samples=128").timing
    assert halved.rollout.low == pytest.approx(2 * 3000 * halved.decode.seconds[1], rel=0.02)
    short = planned("qwen3-30b-a3b", "plan.mean_response_tokens=10").timing
    assert short.rollout.low > 100 * short.decode.seconds[1]


def test_lag_overlaps_rollout_with_training():
    timing = planned("qwen3-30b-a3b").timing
    parts = (timing.rollout, *timing.passes.values(), timing.weight_sync)
    assert timing.lag_0.high == pytest.approx(sum(part.high for part in parts))
    assert timing.lag_1.high == pytest.approx(max(timing.rollout.high, timing.training.high) + timing.weight_sync.high)
    assert timing.idle_share == pytest.approx(1 - timing.rollout.high / timing.training.high)


def test_shared_devices_gain_nothing_from_lag():
    overrides = (
        "placement.rollout=train",
        "rollout.num_replicas=8",
        "rollout.tp_size=1",
        "rollout.gpu_memory_fraction=0.5",
    )
    timing = planned("qwen3-30b-a3b", *overrides).timing
    assert timing.lag_1 is None and timing.idle_share is None


def test_every_model_computes_its_share():
    more = ("algorithm.advantage.estimator=gae", "algorithm.policy_loss.kl_coef=0.01", "algorithm.samples_per_prompt=1")
    passes = planned("qwen3-30b-a3b", *more).timing.passes
    assert list(passes) == ["old log-probs", "reference log-probs", "values", "critic update", "update"]
    assert passes["reference log-probs"] == passes["old log-probs"]
    assert passes["critic update"].low == pytest.approx(4 * passes["values"].low)
    assert passes["values"].low < passes["old log-probs"].low  # no vocabulary


GAE = ("algorithm.advantage.estimator=gae", "algorithm.samples_per_prompt=1", "algorithm.policy_loss.kl_coef=0.01")
OWN_CRITIC = ("placement.critic=critic", "critic.parallel.tp_size=8", "critic.parallel.dp_size=1", "plan.num_nodes=3")


def test_models_of_one_pool_take_turns_and_pools_compute_at_the_same_time():
    together, apart = planned("qwen3-30b-a3b", *GAE).timing, planned("qwen3-30b-a3b", *GAE, *OWN_CRITIC).timing
    assert together.training.high == pytest.approx(sum(each.high for each in together.passes.values()))
    passes = {name: each.high for name, each in apart.passes.items()}
    forward = max(passes["old log-probs"] + passes["reference log-probs"], passes["values"])
    assert apart.training.high == pytest.approx(forward + max(passes["critic update"], passes["update"]))
    assert apart.lag_0.high == pytest.approx(apart.rollout.high + apart.training.high + apart.weight_sync.high)


def test_the_longest_pool_counts_whichever_it_is():
    # 128 ranks of the actor against the critic's 8.
    timing = planned("qwen3-30b-a3b", *GAE, *OWN_CRITIC[:3], "actor.parallel.dp_size=64", "plan.num_nodes=34").timing
    assert timing.passes["critic update"].high > timing.passes["update"].high
    assert timing.training.high == pytest.approx(timing.passes["values"].high + timing.passes["critic update"].high)


def test_greedy_samples_are_scored_and_not_trained_on():
    def rewards_over_update(*overrides: str) -> float:
        model = ("reward.model.weight=1", f"reward.model.path={CONFIGS / 'models' / 'qwen3-30b-a3b'}")
        passes = planned("qwen3-30b-a3b", "algorithm.samples_per_prompt=4", *model, *overrides).timing.passes
        return passes["rewards"].low / passes["update"].low

    with_greedy = rewards_over_update("algorithm.advantage.estimator=remax")
    assert with_greedy == pytest.approx(5 / 4 * rewards_over_update("algorithm.advantage.estimator=rloo"))
