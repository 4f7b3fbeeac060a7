"""A recorded step comes back whole, agrees when computed again, and names the first number that was changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridrl.cli.main import main
from hybridrl.config.algorithm import AdvantageConfig, AlgorithmConfig, PolicyLossConfig, RewardKlConfig
from hybridrl.config.choices import AdvantageEstimator
from hybridrl.config.schema import HttpRewardConfig
from hybridrl.errors import DataError
from hybridrl.replay.recompute import Check, replay
from hybridrl.replay.replay_step import ReplayStep
from hybridrl.replay.step_file import read_step, write_step
from tests.unit.replay.steps import make_config, make_samples, record_step

KEY = b"hybridrl.replay"


def checked(step: ReplayStep) -> dict[str, Check]:
    return {check.quantity: check for check in replay(step)}


@pytest.fixture
def step(tmp_path: Path) -> ReplayStep:
    return read_step(record_step(tmp_path, make_config()))


def test_a_step_comes_back_as_it_was_written(tmp_path: Path, step: ReplayStep) -> None:
    write_step(tmp_path / "again.parquet", step)
    again = read_step(tmp_path / "again.parquet")
    for field in ("step", "version", "config_text", "stop_texts", "reward_kl_coef", "updates"):
        assert getattr(again, field) == getattr(step, field), field
    for field in dataclasses.fields(step.policy):
        got, expected = getattr(again.policy, field.name), getattr(step.policy, field.name)
        if isinstance(expected, np.ndarray):
            assert np.array_equal(got, expected) and got.dtype == expected.dtype, field.name
    for got, made in zip(again.samples, make_samples(), strict=True):
        assert (got.prompt, got.text, got.finish_reason) == (made.prompt, made.text, made.finish_reason)
        assert np.array_equal(got.token_ids, made.token_ids)
        assert np.array_equal(got.policy_versions, made.policy_versions)
    assert step.update_numbers.tolist() == [0, 0, 1, 1]


def test_computing_it_again_finds_no_difference(step: ReplayStep) -> None:
    checks = checked(step)
    assert list(checks) == ["reward", "advantages", "loss_weights", "loss", "approx_kl", "clip_fraction", "ref_kl"]
    assert all(check.num_compared and check.first is None and not check.skipped for check in checks.values())


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(reward_kl=RewardKlConfig(coef=0.1, target=0.05)),
        AlgorithmConfig(policy_loss=PolicyLossConfig(clip_low=0.1), mini_batches_per_step=3),
        AlgorithmConfig(advantage=AdvantageConfig(estimator=AdvantageEstimator.GAE)),
        AlgorithmConfig(advantage=AdvantageConfig(estimator=AdvantageEstimator.REMAX)),
    ],
)
def test_other_algorithms_agree_as_well(tmp_path: Path, algorithm: AlgorithmConfig) -> None:
    checks = checked(read_step(record_step(tmp_path, make_config(algorithm))))
    assert all(check.num_compared and check.first is None for check in checks.values())
    assert ("returns" in checks) is (algorithm.advantage.estimator is AdvantageEstimator.GAE)


def test_a_changed_value_of_the_critic_changes_advantages_and_returns(tmp_path: Path) -> None:
    config = make_config(AlgorithmConfig(advantage=AdvantageConfig(estimator=AdvantageEstimator.GAE, trace_decay=0.9)))
    step = read_step(record_step(tmp_path, config))
    assert step.values is not None
    step.values[0, 3] += 1.0
    checks = checked(step)
    assert checks["advantages"].first is not None and checks["returns"].first is not None


def test_a_changed_reward_is_named_with_both_values(tmp_path: Path) -> None:
    first = checked(read_step(record_step(tmp_path, make_config(), reward=0.5)))["reward"].first
    assert first is not None
    assert (first.where, first.got, first.expected) == ("reverse:0 sample 1", 1.0, 0.5)


def test_a_changed_advantage_is_named_by_its_token_and_does_not_hide_the_rest(step: ReplayStep) -> None:
    step.policy.advantages[2, 4] += 0.5
    checks = checked(step)
    first = checks["advantages"].first
    assert first is not None
    assert (first.where, checks["advantages"].num_different) == ("reverse:1 sample 0, token 4", 1)
    assert first.expected - first.got == pytest.approx(0.5)
    assert checks["reward"].first is None
    assert checks["loss"].first is not None and checks["loss"].first.where == "update 1"


def test_changed_weights_and_losses_are_found(step: ReplayStep) -> None:
    step.policy.loss_weights[0, 3] *= 2
    assert checked(step)["loss_weights"].first is not None
    updates = (step.updates[0], dataclasses.replace(step.updates[1], approx_kl=0.5))
    first = checked(dataclasses.replace(step, updates=updates))["approx_kl"].first
    assert first is not None
    assert (first.where, first.expected) == ("update 1", 0.5)


def test_a_number_that_is_not_finite_is_a_difference(step: ReplayStep) -> None:
    step.policy.advantages[0, 2] = np.nan
    assert checked(step)["advantages"].num_different == 1


def test_files_of_the_user_are_run_on_request_only(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    mine = tmp_path / "mine.py"
    mine.write_text(
        f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n"
        "def estimate(inputs, config):\n    return inputs.loss_mask * inputs.rewards[:, None]\n"
    )
    config = make_config(AlgorithmConfig(advantage=AdvantageConfig(path=str(mine), name="estimate")))
    path = record_step(tmp_path, config)
    ran.unlink()
    assert checked(read_step(path))["advantages"].skipped == f"it runs {mine}; allow that with --run-files"
    assert not ran.exists()
    allowed = {check.quantity: check for check in replay(read_step(path), runs_user_files=True)}
    assert ran.exists()
    assert allowed["advantages"].first is None and not allowed["advantages"].skipped


def test_what_cannot_be_computed_again_is_said(tmp_path: Path) -> None:
    config = make_config(AlgorithmConfig(policy_loss=PolicyLossConfig(entropy_coef=0.01)))
    config.reward.http = HttpRewardConfig(weight=1.0, url="http://localhost:1")
    checks = checked(read_step(record_step(tmp_path, config)))
    assert "is a service" in checks["reward"].skipped
    assert "entropy of each token is not recorded" in checks["loss"].skipped


def test_the_command_reports_and_exits_with_1_on_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record_step(tmp_path, make_config())
    assert main(["replay", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 3, policy version 3: 4 samples, 16 trained tokens, 2 update(s)"
    assert lines[-1] == "no difference"

    wrong = record_step(tmp_path, make_config(), reward=0.5)
    assert main(["replay", str(wrong)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "first difference: reward of reverse:0 sample 1: got 1.0, expected 0.5"


def with_metadata(path: Path, **changed: object) -> None:
    table = pq.read_table(path)
    metadata = json.loads(table.schema.metadata[KEY]) | changed
    pq.write_table(table.replace_schema_metadata({KEY: json.dumps(metadata)}), path)


def test_files_that_cannot_be_understood_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = record_step(tmp_path, make_config())
    with_metadata(path, schema_version=99)
    assert main(["replay", str(path)]) == 2
    assert "got schema version 99, expected 1; replay it with the version" in capsys.readouterr().err

    path = record_step(tmp_path, make_config())
    with_metadata(path, config="data: {task: calc}\nreward: {}\nalgorithm: {colour: red}\n")
    with pytest.raises(DataError, match=r"(?s)this version of HybridRL does not know it.*algorithm\.colour"):
        replay(read_step(path))

    path = record_step(tmp_path, make_config())
    pq.write_table(pq.read_table(path).drop_columns(["advantages"]), path)
    with pytest.raises(DataError, match="got columns"):
        read_step(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="expected a replay file"):
        read_step(path)
    pq.write_table(pa.table({"step": [1]}), path)
    with pytest.raises(DataError, match=r"parquet without the metadata hybridrl\.replay, expected a replay file"):
        read_step(path)
    for place in (tmp_path / "missing.parquet", tmp_path):
        with pytest.raises(DataError, match=f"{place}: is no file, expected a replay file"):
            read_step(place)


def test_a_step_that_is_not_chosen_writes_nothing(tmp_path: Path) -> None:
    config = make_config()
    config.trainer.replay_steps = "4"
    assert not record_step(tmp_path, config).exists()
