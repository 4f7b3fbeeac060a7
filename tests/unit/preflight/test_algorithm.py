"""Algorithms that do not hold together, and keys that the chosen one would not read, are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.config.choices import AdvantageEstimator, PolicyLossKind
from tests.unit.preflight.experiments import TRAIN, write_experiment
from tests.unit.preflight.test_check import checked, problems

A = "algorithm."
BYPASS = A + "rollout_correction.old_policy=bypass"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("advantage.estimator=grp",), "algorithm.advantage.estimator: got grp, expected one of grpo, dr_grpo, "),
        (
            ("samples_per_prompt=1", "prompts_per_step=8"),
            "algorithm.samples_per_prompt: got 1, expected at least 2, since algorithm.advantage.estimator is grpo, which "
            "compares samples of one prompt; raise it",
        ),
        (
            ("samples_per_prompt=1", "prompts_per_step=8", "advantage.estimator=reinforce_pp", "max_sampling_rounds=2"),
            "algorithm.max_sampling_rounds: got 2, expected 1, since algorithm.samples_per_prompt is 1",
        ),
        (
            ("loss_aggregation=seq_mean_token_sum_norm",),
            "algorithm.loss_norm_tokens: got null, expected a number of tokens, since algorithm.loss_aggregation is "
            "seq_mean_token_sum_norm; set it, e.g. to the longest response",
        ),
        (
            ("overlong.max_tokens=8", "overlong.buffer_tokens=9"),
            "algorithm.overlong.buffer_tokens: got 9, expected at most algorithm.overlong.max_tokens = 8; lower it",
        ),
        (
            ("policy_loss.kl_coef=0.1", "reward_kl.coef=0.1"),
            "algorithm.reward_kl.coef: got 0.1, expected 0, since algorithm.policy_loss.kl_coef is above 0",
        ),
        (
            ("policy_loss.kl_coef=0.1", "policy_loss.kl_estimator=k1"),
            "algorithm.policy_loss.kl_estimator: got k1, expected k2 or k3, or kl_unbiased_gradient",
        ),
        (
            ("reward_kl.coef=0.1", "reward_kl.target=1", "reward_kl.horizon_samples=31"),
            "algorithm.reward_kl.horizon_samples: got 31, expected at least the 32 samples of a step; raise it",
        ),
        (
            ("advantage.path=rewards.py",),
            "algorithm.advantage.name: got null, expected a value, since algorithm.advantage.path is set; "
            "set both or neither",
        ),
        (("policy_loss.name=score",), "algorithm.policy_loss.path: got null, expected a value"),
        (("advantage.path=gone.py", "advantage.name=mine"), "gone.py is no file; correct the path"),
        (
            ("policy_loss.path=rewards.py", "policy_loss.name=mine"),
            "defines no function 'mine' (functions: score); correct the name",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], message: str
) -> None:
    path = write_experiment(tmp_path)
    monkeypatch.chdir(tmp_path)
    (problem,) = problems(path, *(A + override for override in overrides))
    assert message in problem


@pytest.mark.parametrize("kind", ["gspo", "gmpo"])
def test_losses_over_sequences_are_refused_with_context_parallelism(tmp_path: Path, kind: str) -> None:
    found = problems(write_experiment(tmp_path), f"algorithm.policy_loss.kind={kind}", "actor.parallel.cp_size=2")
    assert any(
        f"actor.parallel.cp_size: got 2, expected 1, since the policy loss {kind} sees whole sequences" in problem
        for problem in found
    )


def test_bypass_has_no_gap_to_bound(tmp_path: Path) -> None:
    (problem,) = problems(write_experiment(tmp_path), BYPASS, "trainer.max_logprob_gap=1e-3")
    assert "expected decoupled, since trainer.max_logprob_gap is 0.001" in problem


@pytest.mark.parametrize(
    ("key", "overrides", "reason"),
    [
        ("advantage.discount=0.9", (), "when algorithm.advantage.estimator is grpo"),
        ("advantage.whiten=false", (), "when algorithm.advantage.estimator is grpo"),
        ("advantage.needs_values=true", (), "when algorithm.advantage.path is null"),
        ("advantage.needs_greedy=true", (), "when algorithm.advantage.path is null"),
        (
            "advantage.epsilon=1",
            ("advantage.estimator=gae", "advantage.whiten=false"),
            "when algorithm.advantage.whiten is false",
        ),
        ("advantage.epsilon=1", ("advantage.estimator=rloo",), "when algorithm.advantage.estimator is rloo"),
        ("policy_loss.clip_low=0.1", ("policy_loss.kind=sapo",), "when algorithm.policy_loss.kind is sapo"),
        ("policy_loss.dual_clip=2", (), "when algorithm.policy_loss.kind is clip"),
        ("policy_loss.positive_temperature=2", ("policy_loss.kind=gspo",), "when algorithm.policy_loss.kind is gspo"),
        ("policy_loss.kl_estimator=k2", (), "when algorithm.policy_loss.kl_coef is 0"),
        (
            "policy_loss.kl_unbiased_gradient=true",
            ("policy_loss.kl_coef=1", "policy_loss.kl_estimator=k2"),
            "when algorithm.policy_loss.kl_estimator is k2, whose own gradient that is",
        ),
        ("reward_kl.target=1", (), "when algorithm.reward_kl.coef is 0"),
        ("reward_kl.horizon_samples=99", ("reward_kl.coef=1",), "when algorithm.reward_kl.target is null"),
        ("overlong.penalty=2", (), "when algorithm.overlong.max_tokens is null"),
        ("loss_norm_tokens=8", (), "when algorithm.loss_aggregation is token_mean"),
        ("rollout_correction.min_weight=0.5", (), "when algorithm.rollout_correction.method is truncate"),
        (
            "rollout_correction.level=sequence",
            ("rollout_correction.method=none",),
            "when algorithm.rollout_correction.method is none",
        ),
        (
            "rollout_correction.max_weight=3",
            ("rollout_correction.old_policy=bypass",),
            "when algorithm.rollout_correction.old_policy is bypass, which makes all weights 1",
        ),
        (
            "policy_loss.kind=gspo",
            ("policy_loss.path=rewards.py", "policy_loss.name=score"),
            "when algorithm.policy_loss.path is set",
        ),
        (
            "advantage.estimator=rloo",
            ("advantage.path=rewards.py", "advantage.name=score"),
            "when algorithm.advantage.path is set",
        ),
    ],
)
def test_a_key_that_the_algorithm_does_not_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, overrides: tuple[str, ...], reason: str
) -> None:
    path = write_experiment(tmp_path)
    (tmp_path / "rewards.py").write_text("def score(first, second):\n    return first\n")
    monkeypatch.chdir(tmp_path)
    checked(path, *(A + override for override in overrides))
    (problem,) = problems(path, A + key, *(A + override for override in overrides))
    assert f"{A}{key.partition('=')[0]}: got a value, expected none: it is not read {reason}" in problem


@pytest.mark.parametrize("estimator", [e.value for e in AdvantageEstimator])
def test_every_estimator_is_accepted_by_its_name_alone(tmp_path: Path, estimator: str) -> None:
    checked(write_experiment(tmp_path), f"{A}advantage.estimator={estimator}")


@pytest.mark.parametrize("kind", [kind.value for kind in PolicyLossKind])
def test_every_policy_loss_is_accepted_by_its_name_alone(tmp_path: Path, kind: str) -> None:
    checked(write_experiment(tmp_path), f"{A}policy_loss.kind={kind}")


def test_the_algorithm_of_the_schema_is_grpo_as_written_out(tmp_path: Path) -> None:
    written = """  advantage: {estimator: grpo, epsilon: 1e-4}
  policy_loss: {kind: clip, clip_low: 0.2, clip_high: 0.28}
  rollout_correction: {old_policy: decoupled, method: truncate, level: token, max_weight: 2}
  loss_aggregation: token_mean
"""
    plain, full = tmp_path / "plain", tmp_path / "full"
    plain.mkdir()
    full.mkdir()
    first = checked(write_experiment(plain)).config.algorithm
    assert checked(write_experiment(full, TRAIN + written)).config.algorithm == first
