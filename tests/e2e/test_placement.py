"""Placement changes no number: all roles on the ranks of the actor, and reference, critic and rollout elsewhere, train alike.

The refusal of two layouts in one pool is preflight's: tests/unit/preflight/test_roles.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from hybridrl.controller.run import train
from tests.e2e.runs import demo_config, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_STEPS = 2
PPO_WITH_KL = (
    f"trainer.num_steps={NUM_STEPS}",
    "algorithm.prompts_per_step=8",
    "algorithm.samples_per_prompt=4",
    "algorithm.mini_batches_per_step=2",
    "algorithm.advantage.estimator=gae",
    "algorithm.policy_loss.kl_coef=0.1",
    "actor.optimizer.warmup_steps=0",
    "critic.optimizer.lr=1e-3",
)
TOGETHER = ("actor.parallel.pp_size=1",)
APART = (
    *TOGETHER,
    "placement.rollout=rollout",
    *(f"placement.{role}=side" for role in ("reference", "critic")),
    *(f"{role}.parallel.{key}" for role in ("reference", "critic") for key in ("tp_size=1", "ep_size=1", "pp_size=2")),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run folders of two steps: all models on tp 2 x ep 2, and reference and critic on pp 2 in a pool of their own."""
    runs_dir = tmp_path_factory.mktemp("runs")
    for name, placement in (("together", TOGETHER), ("apart", APART)):
        assert train(demo_config(runs_dir, name, *PPO_WITH_KL, *placement)) == 0
    return {name: runs_dir / name for name in ("together", "apart")}


def test_the_policies_of_both_placements_sample_the_same_tokens(runs: dict[str, Path]) -> None:
    for step in range(NUM_STEPS):
        tables = [pyarrow.parquet.read_table(run / "rollouts" / f"step_{step:06d}.parquet") for run in runs.values()]
        first, second = ([row.as_py() for row in table["token_ids"]] for table in tables)
        assert first == second, f"step {step}"


@pytest.mark.parametrize("metric", ["actor/loss", "actor/ref_kl", "critic/loss", "critic/value_mean"])
def test_losses_are_the_same_in_both_placements(runs: dict[str, Path], metric: str) -> None:
    together, apart = _series(runs, metric)
    np.testing.assert_allclose(apart, together, rtol=0, atol=1e-5)
    assert all(np.abs(together) > 1e-4), together


@pytest.mark.parametrize("metric", ["actor/grad_norm", "critic/grad_norm"])
def test_gradients_are_the_same_in_both_placements(runs: dict[str, Path], metric: str) -> None:
    together, apart = _series(runs, metric)
    # Adam's first steps are as long for a gradient of rounding as for any other, so parameters differ a little from then on.
    np.testing.assert_allclose(apart, together, rtol=1e-4)


def _series(runs: dict[str, Path], metric: str) -> list[list[float]]:
    series = [[row[metric] for row in read_metrics(run)] for run in runs.values()]
    assert [len(each) for each in series] == [NUM_STEPS] * 2
    return series
