"""The loop on fakes: order, lag, evaluation schedule, thresholds and the ways in which it ends."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridrl.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    PolicyLossConfig,
    RewardKlConfig,
    RolloutCorrectionConfig,
)
from hybridrl.config.choices import AdvantageEstimator, OldPolicy
from hybridrl.config.schema import TrainerConfig
from hybridrl.controller.evaluation import Evaluator
from hybridrl.controller.run_state import RunState, read_run_state, write_run_state
from hybridrl.controller.stopping import StopRequest, stop_signals
from hybridrl.controller.trainer import Trainer, TrainResult
from hybridrl.data.batch import PolicyBatch
from hybridrl.data.sample import Sample
from hybridrl.errors import DataError, EngineError
from hybridrl.rewards.result import RewardResult
from hybridrl.roles.failure import Failure, FailureKind
from tests.unit.controller.fakes import (
    AlternatingScorer,
    FakeCheckpoints,
    FakeCritic,
    FakeFuture,
    FakePrompts,
    FakeRecorder,
    FakeReference,
    FakeReplays,
    FakeUpdate,
    World,
    make_prompt,
    make_rewards,
)

PROMPTS, SAMPLES = 2, 4


def _trainer(
    world: World,
    recorder: FakeRecorder,
    *,
    kl_coef: float = 0.0,
    mini_batches: int = 1,
    epochs: int = 1,
    max_rounds: int = 1,
    rollout_correction: RolloutCorrectionConfig | None = None,
    advantage: AdvantageConfig | None = None,
    critic: FakeCritic | None = None,
    critic_warmup_steps: int = 0,
    reward_kl: RewardKlConfig | None = None,
    checkpoints: FakeCheckpoints | None = None,
    start: RunState | None = None,
    replays: FakeReplays | None = None,
    stop: StopRequest | None = None,
    **settings: object,
) -> Trainer:
    config = TrainerConfig(**{"num_steps": 3, "eval_every_steps": 0} | settings)
    algorithm = AlgorithmConfig(
        prompts_per_step=PROMPTS,
        samples_per_prompt=SAMPLES,
        policy_loss=PolicyLossConfig(kl_coef=kl_coef),
        mini_batches_per_step=mini_batches,
        epochs_per_step=epochs,
        max_sampling_rounds=max_rounds,
        rollout_correction=rollout_correction or RolloutCorrectionConfig(),
        advantage=advantage or AdvantageConfig(),
        reward_kl=reward_kl or RewardKlConfig(),
    )
    evaluator = Evaluator(world, AlternatingScorer(), [make_prompt(f"eval/{i}") for i in range(4)])
    return Trainer(
        config,
        algorithm,
        actor=world,
        rollout=world,
        weight_sync=world,
        prompts=FakePrompts(start.stream.position if start else 0),
        scorer=AlternatingScorer(),
        evaluator=evaluator,
        recorder=recorder,
        reference=FakeReference(world),
        critic=critic,
        critic_warmup_steps=critic_warmup_steps,
        checkpoints=checkpoints,
        start=start,
        replays=replays,
        stop=stop,
    )


def test_with_lag_0_a_step_is_the_plain_sequence() -> None:
    world = World()
    _trainer(world, FakeRecorder(), num_steps=2).run()
    assert world.diary == [
        "start rollout v0", "finish rollout v0", "old_logprobs v0", "update v0", "sync v1",
        "start rollout v1", "finish rollout v1", "old_logprobs v1", "update v1", "sync v2",
    ]  # fmt: skip


def test_with_lag_1_the_next_rollout_starts_before_the_update_and_ends_before_the_sync() -> None:
    world, recorder = World(), FakeRecorder()
    _trainer(world, recorder, num_steps=3, max_policy_lag=1).run()
    # A fake rollout is done when it is first looked at, which is while the log-probs are waited for.
    assert world.diary == [
        "start rollout v0", "start rollout v0", "finish rollout v0", "old_logprobs v0", "finish rollout v0", "update v0", "sync v1",
        "start rollout v1", "old_logprobs v1", "finish rollout v1", "update v1", "sync v2",
        "old_logprobs v2", "update v2", "sync v3",
    ]  # fmt: skip
    assert [metrics["lag/max"] for _, metrics, _ in recorder.steps] == [0, 1, 1]
    assert [metrics["lag/mean"] for _, metrics, _ in recorder.steps] == [0.0, 1.0, 1.0]


def test_updates_give_their_logprobs_on_the_steps_to_be_replayed_only() -> None:
    replays = FakeReplays(frozenset({1}))
    _trainer(World(), FakeRecorder(), num_steps=3, replays=replays).run()
    assert replays.recorded == [(step, PROMPTS * SAMPLES, step == 1) for step in range(3)]


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_no_sample_is_older_than_the_lag_and_no_prompt_is_drawn_in_vain(lag: int) -> None:
    world, recorder = World(), FakeRecorder()
    trainer = _trainer(world, recorder, num_steps=7, max_policy_lag=lag)
    trainer.run()
    assert [metrics["lag/max"] for _, metrics, _ in recorder.steps] == [min(step, lag) for step in range(7)]
    assert world.diary.count("finish rollout v0") == min(lag, 6) + 1
    assert sum(entry.startswith("start rollout") for entry in world.diary) == 7


def test_every_promised_metric_is_recorded_at_every_step() -> None:
    world, recorder = World(), FakeRecorder()
    _trainer(world, recorder).run()
    expected = {
        "policy_version", "reward/mean", "response_tokens/mean", "actor/loss", "actor/grad_norm", "actor/entropy",
        "logprob/rollout_vs_old_abs_max", "logprob/rollout_vs_old_abs_mean", "logprob/rollout_vs_old_kl_k3",
        "logprob/rollout_vs_old_pearson", "logprob/rollout_vs_old_large_share", "weight_sync/wire_bytes",
        "weight_sync/lower_bound_bytes", "weight_sync/verified", "weight_sync/seconds", "weight_sync/checksum_seconds",
        "throughput/tokens_per_s", "lag/mean", "lag/max", "groups/zero_advantage",
    }  # fmt: skip
    for index, (step, metrics, rollouts) in enumerate(recorder.steps):
        assert step == metrics["policy_version"] == index
        assert expected <= metrics.keys()
        assert all(math.isfinite(value) for value in metrics.values())
        assert len(rollouts) == PROMPTS * SAMPLES
    assert {"rollout", "reward", "old_logprobs", "advantages", "train", "weight_sync"} == set(recorder.phases)
    assert recorder.steps[0][1]["reward/mean"] == 0.5
    assert recorder.steps[0][1]["response_tokens/mean"] == 3
    assert recorder.steps[0][1]["actor/entropy"] == 0.5


def test_evaluation_runs_before_training_on_schedule_and_at_the_end_and_joins_a_step() -> None:
    world, recorder = World(), FakeRecorder()
    result = _trainer(world, recorder, num_steps=5, eval_every_steps=2).run()
    assert [version for version, _ in recorder.evaluations] == [0, 2, 4, 5]
    assert all(metrics["eval/policy_version"] == version for version, metrics in recorder.evaluations)
    assert recorder.diary == ["eval 0", "step 0", "eval 2", "step 1", "step 2", "eval 4", "step 3", "eval 5", "step 4"]
    assert [entry for entry in world.diary if entry.startswith("start eval")] == [
        f"start eval v{v}" for v in (0, 2, 4, 5)
    ]
    assert result == TrainResult(5, 0.5, 0.5)


def test_evaluation_can_be_turned_off() -> None:
    recorder = FakeRecorder()
    assert _trainer(World(), recorder).run() == TrainResult(3, None, None)
    assert not recorder.evaluations


def test_the_run_ends_early_at_the_wanted_accuracy() -> None:
    world, recorder = World(), FakeRecorder()
    result = _trainer(world, recorder, num_steps=9, eval_every_steps=3, stop_at_accuracy=0.5).run()
    assert result.num_steps == 0 and not recorder.steps
    assert _trainer(World(), FakeRecorder(), num_steps=4, eval_every_steps=2, stop_at_accuracy=0.6).run().num_steps == 4


def test_the_reference_is_asked_only_with_a_kl_term() -> None:
    world = World()
    _trainer(world, FakeRecorder(), num_steps=1, kl_coef=0.1).run()
    assert "ref_logprobs" in world.diary
    assert world.last_batch.ref_logprobs is not None and (world.last_batch.ref_logprobs == -1.25).all()


def test_each_mini_batch_is_an_update_of_its_own() -> None:
    world = World()
    _trainer(world, FakeRecorder(), num_steps=1, mini_batches=4).run()
    assert world.diary.count("update v0") == 4


def test_a_log_prob_gap_past_the_threshold_fails_the_run_before_the_update() -> None:
    world = World(logprob_gap=0.25)
    with pytest.raises(EngineError) as caught:
        _trainer(world, FakeRecorder(), max_logprob_gap=0.125).run()
    message = str(caught.value)
    assert "prompt p0 sample 0, token 2 (id 7, sampled by version 0) is 0.25, expected at most 0.125" in message
    assert "trainer.max_logprob_gap" in message and "sampler -1, trainer -0.75" in message
    assert not any(entry.startswith("update") for entry in world.diary)


def test_the_threshold_does_not_apply_to_tokens_of_older_versions() -> None:
    world, recorder = World(), FakeRecorder()
    trainer = _trainer(world, recorder, num_steps=2, max_policy_lag=1, max_logprob_gap=0.125)
    original = world.sync

    def sync_then_drift(version: int) -> object:
        world.logprob_gap = 0.25
        return original(version)

    world.sync = sync_then_drift  # type: ignore[method-assign, assignment]
    trainer.run()
    assert [metrics["logprob/rollout_vs_old_abs_max"] for _, metrics, _ in recorder.steps] == [0.0, 0.25]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_log_prob_that_is_not_finite_fails_the_run(value: float) -> None:
    with pytest.raises(EngineError, match=r"prompt p0 sample 0, token 2 .* is not finite"):
        _trainer(World(logprob_gap=value), FakeRecorder()).run()


def test_a_failed_update_ends_the_run_with_the_ranks_error_and_no_sync() -> None:
    world = World(fail_update_at=1)
    with pytest.raises(EngineError, match=r"actor rank 1 failed in phase update:\nValueError: bad row"):
        _trainer(world, FakeRecorder()).run()
    assert "sync v2" not in world.diary


class AskedToStop(World):
    """SIGUSR1 comes while the second step updates the policy."""

    def update(self, batch: PolicyBatch, *, want_logprobs: bool = False) -> FakeFuture[FakeUpdate]:
        if self.trainer_version == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().update(batch, want_logprobs=want_logprobs)


def test_a_stop_that_is_asked_for_waits_for_the_step_and_its_checkpoint() -> None:
    stop, checkpoints, recorder = StopRequest(), FakeCheckpoints(), FakeRecorder()
    with stop_signals(stop):
        trainer = _trainer(AskedToStop(), recorder, checkpoints=checkpoints, stop=stop)
        result = trainer.run()
    assert (result.num_steps, result.is_stopped) == (2, True)
    assert [step for step, *_ in recorder.steps] == [0, 1]
    assert [state.step for state in checkpoints.states] == [1, 2] and checkpoints.is_finished
    assert checkpoints.is_last == [False, True]


def test_ctrl_c_passes_through_the_loop_and_keeps_the_finished_steps() -> None:
    recorder = FakeRecorder()
    with pytest.raises(KeyboardInterrupt):
        _trainer(World(interrupt_update_at=2), recorder).run()
    assert [step for step, _, _ in recorder.steps] == [0, 1]


def test_a_step_without_a_single_scored_sample_is_an_error() -> None:
    class DropsAll(AlternatingScorer):
        def score(self, samples: Sequence[Sample]) -> RewardResult:
            return make_rewards([None] * len(samples))

    trainer = _trainer(World(), FakeRecorder())
    trainer._scorer = DropsAll()
    with pytest.raises(DataError, match="step 0: not one sample could be scored"):
        trainer.run()


class ScoresByPrompt(AlternatingScorer):
    """Prompts with an odd number have samples of equal rewards."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return make_rewards([float(s.sample_index % 2) * (int(s.prompt.prompt_id[1:]) % 2 == 0) for s in samples])


@pytest.mark.parametrize("lag", [0, 1])
def test_dynamic_sampling_replaces_groups_that_teach_nothing_and_keeps_the_lag(lag: int) -> None:
    world, recorder = World(), FakeRecorder()
    trainer = _trainer(world, recorder, num_steps=3, max_policy_lag=lag, max_rounds=4)
    trainer._scorer = ScoresByPrompt()
    trainer.run()
    for step, metrics, rollouts in recorder.steps:
        assert len(rollouts) == PROMPTS * SAMPLES
        assert metrics["groups/zero_advantage"] == 0 and metrics["groups/replaced"] >= 1
        assert metrics["lag/max"] <= min(step, lag)
    trained = [record.prompt_id for _, _, rollouts in recorder.steps for record in rollouts[::SAMPLES]]
    assert len(set(trained)) == len(trained) == 3 * PROMPTS
    # Every prompt drawn was trained on or replaced: none is lost.
    replaced = sum(int(metrics["groups/replaced"]) for _, metrics, _ in recorder.steps)
    assert trainer._prompts.taken == len(trained) + replaced


def test_bypass_takes_the_samplers_log_probs_and_runs_no_pass_for_old_ones() -> None:
    world, recorder = World(logprob_gap=0.25), FakeRecorder()
    bypass = RolloutCorrectionConfig(old_policy=OldPolicy.BYPASS)
    _trainer(world, recorder, num_steps=1, rollout_correction=bypass).run()
    assert not any(entry.startswith("old_logprobs") for entry in world.diary)
    assert (world.last_batch.old_logprobs == world.last_batch.rollout_logprobs).all()
    assert recorder.steps[0][1]["actor/entropy"] == 0.5
    assert "logprob/rollout_vs_old_abs_max" not in recorder.steps[0][1]


GAE = AdvantageConfig(estimator=AdvantageEstimator.GAE, whiten=False)


def test_the_critic_values_states_and_learns_the_returns_of_the_states_before_each_token() -> None:
    world, recorder = World(), FakeRecorder()
    critic = FakeCritic(world)
    _trainer(world, recorder, num_steps=1, advantage=GAE, critic=critic).run()
    assert world.diary[2:] == ["old_logprobs v0", "values", "update v0", "update values v0", "sync v1"]
    # Prompts of 2 tokens and responses of 3: the policy chose tokens 2, 3, 4 in the states after tokens 1, 2, 3.
    (batch,) = critic.batches
    assert batch.loss_mask.tolist() == [[False, True, True, True, False]] * 8
    assert batch.old_values[0].tolist() == [0, 0.125, 0.25, 0.375, 0.5]
    # With lambda and discount 1 the return is the reward, and the advantage what it is above the value.
    assert batch.returns[:2].tolist() == [[0, 1, 1, 1, 0], [0, 0, 0, 0, 0]]
    assert world.last_batch.advantages[0].tolist() == [0, 0, 0.875, 0.75, 0.625]
    assert (
        batch.loss_weights.sum() == pytest.approx(1) and (batch.loss_weights > 0).tolist() == batch.loss_mask.tolist()
    )
    metrics = recorder.steps[0][1]
    assert metrics["critic/loss"] == 0.125 and metrics["critic/explained_variance"] == 0.75
    assert {"critic/clip_fraction", "critic/grad_norm", "critic/lr", "critic/skipped_updates"} <= metrics.keys()
    assert "values" in recorder.phases


def test_mini_batches_of_actor_and_critic_alternate_and_weigh_a_global_batch_each() -> None:
    world = World()
    critic = FakeCritic(world)
    _trainer(world, FakeRecorder(), num_steps=1, mini_batches=2, advantage=GAE, critic=critic).run()
    assert world.diary[4:-1] == ["update v0", "update values v0"] * 2
    assert [batch.loss_weights.sum() for batch in critic.batches] == pytest.approx([1, 1])


def test_each_epoch_passes_over_the_same_mini_batches_with_the_values_from_before_the_first() -> None:
    world = World()
    critic = FakeCritic(world)
    _trainer(world, FakeRecorder(), num_steps=1, mini_batches=2, epochs=3, advantage=GAE, critic=critic).run()
    assert world.diary[4:-1] == ["update v0", "update values v0"] * 6
    first, second, third = (critic.batches[i : i + 2] for i in (0, 2, 4))
    assert first == second == third
    assert world.diary.count("old_logprobs v0") == 1


def test_while_the_critic_warms_up_the_actor_stays_and_its_metrics_are_left_out() -> None:
    world, recorder = World(), FakeRecorder()
    _trainer(world, recorder, num_steps=3, advantage=GAE, critic=FakeCritic(world), critic_warmup_steps=2).run()
    assert [entry for entry in world.diary if entry.startswith("update")] == [
        "update values v0", "update values v1", "update v2", "update values v2",
    ]  # fmt: skip
    assert ["actor/loss" in metrics for _, metrics, _ in recorder.steps] == [False, False, True]
    assert all("critic/loss" in metrics and "actor/entropy" in metrics for _, metrics, _ in recorder.steps)


def test_a_critic_that_fails_while_the_actor_computes_ends_the_run_by_its_name() -> None:
    world = World()
    critic = FakeCritic(world, failures=[Failure("critic", 2, "values", FailureKind.RAISED, "ValueError: bad row")])
    with pytest.raises(EngineError, match=r"^critic rank 2 failed in phase values:\nValueError: bad row"):
        _trainer(world, FakeRecorder(), advantage=GAE, critic=critic).run()
    assert not any(entry.startswith("update") for entry in world.diary)


def test_an_algorithm_without_values_leaves_a_critic_alone() -> None:
    world = World()
    _trainer(world, FakeRecorder(), num_steps=1, critic=FakeCritic(world), critic_warmup_steps=1).run()
    assert "values" not in world.diary and "update v0" in world.diary


def test_a_greedy_sample_of_each_prompt_is_its_baseline_and_is_not_trained_on() -> None:
    world, recorder = World(), FakeRecorder()
    _trainer(world, recorder, num_steps=1, advantage=AdvantageConfig(estimator=AdvantageEstimator.REMAX)).run()
    # Five samples a prompt are scored 1, 0, 1, 0, 1 and 0, 1, 0, 1, 0: the fifth is the greedy one.
    assert world.last_batch.advantages[:, 2].tolist() == [0, -1, 0, -1, 0, 1, 0, 1]
    metrics, rollouts = recorder.steps[0][1:]
    assert len(rollouts) == metrics["samples/trained"] == PROMPTS * SAMPLES
    assert metrics["samples/dropped"] == 0 and metrics["reward/greedy_mean"] == 0.5


def _without_times(recorder: FakeRecorder) -> list[tuple[int, dict[str, object], list[tuple[str, int, bytes]]]]:
    def is_time(name: str) -> bool:
        return name.startswith(("time_s/", "throughput/")) or name.endswith("seconds")

    return [
        (
            step,
            {name: value for name, value in metrics.items() if not is_time(name)},
            [(r.prompt_id, r.sample_index, r.policy_versions.tobytes()) for r in rollouts],
        )
        for step, metrics, rollouts in recorder.steps
    ]


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("stopped_after", [1, 3, 5])
def test_a_run_that_goes_on_from_its_files_is_the_uninterrupted_one(
    tmp_path: Path, lag: int, stopped_after: int
) -> None:
    settings = {
        "num_steps": 5,
        "max_policy_lag": lag,
        "max_rounds": 3,
        "eval_every_steps": 2,
        "reward_kl": RewardKlConfig(coef=0.1, target=0.05),
    }
    whole, checkpoints = FakeRecorder(), FakeCheckpoints()
    result = _trainer(World(), whole, checkpoints=checkpoints, **settings).run()
    assert [state.step for state in checkpoints.states] == [1, 2, 3, 4, 5] and checkpoints.is_finished
    assert len({metrics["reward/kl_coef"] for _, metrics, _ in whole.steps}) == 5

    write_run_state(tmp_path, checkpoints.states[stopped_after - 1])
    start, rest, world = read_run_state(tmp_path), FakeRecorder(), World()
    assert len(start.waiting) == min(lag, 5 - stopped_after)
    world.version = world.trainer_version = stopped_after
    resumed = _trainer(world, rest, start=start, **settings).run()
    assert _without_times(rest) == _without_times(whole)[stopped_after:]
    evaluated = [version for version, _ in whole.evaluations if version > stopped_after]
    assert [version for version, _ in rest.evaluations] == evaluated
    assert resumed == result
