"""Placement changes no number: all models on the ranks of the actor, and all others elsewhere in another layout, train alike.

PPO with a critic, a reference, a reward model and rollouts. The refusal of two layouts in one pool is preflight's:
tests/unit/preflight/test_roles.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from hybridrl.controller.run import train
from tests.e2e.runs import CALC, demo_config, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_STEPS, NUM_PROMPTS, HIDDEN = 2, 8, 128
PPO_WITH_KL = (
    f"trainer.num_steps={NUM_STEPS}",
    "data.task=file",
    "reward.exact_weight=1",
    "reward.model.weight=0.5",
    f"algorithm.prompts_per_step={NUM_PROMPTS}",
    "algorithm.samples_per_prompt=4",
    "algorithm.mini_batches_per_step=2",
    "algorithm.advantage.estimator=gae",
    "algorithm.policy_loss.kl_coef=0.1",
    "actor.optimizer.warmup_steps=0",
    "actor.optimizer.lr=5e-5",
    "critic.optimizer.lr=1e-3",
)
BESIDE = {"reference": "reference", "critic": "critic", "reward_model": "reward.model"}
"""Role -> its section."""
TOGETHER = ("actor.parallel.pp_size=1",)
APART = (
    *TOGETHER,
    "placement.rollout=rollout",
    *(f"placement.{role}=side" for role in BESIDE),
    *(f"{section}.parallel.{key}" for section in BESIDE.values() for key in ("tp_size=1", "ep_size=1", "pp_size=2")),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run folders of two steps: all models on tp 2 x ep 2, and all but the actor on pp 2 in a pool of their own."""
    folder = tmp_path_factory.mktemp("placement")
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": f"{a}+{a + 7}-11=?", "answer": str(2 * a - 4)} for a in range(20, 20 + NUM_STEPS * NUM_PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = (f"data.train_path={prompts}", f"reward.model.path={_save_reward_model(folder / 'reward')}")
    for name, placement in (("together", TOGETHER), ("apart", APART)):
        assert train(demo_config(folder, name, *PPO_WITH_KL, *inputs, *placement)) == 0
    return {name: folder / name for name in ("together", "apart")}


def _save_reward_model(folder: Path) -> Path:
    """Write the demo's checkpoint with a value head."""
    shutil.copytree(CALC.parent / "checkpoints" / "calc", folder)
    head = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(5)) / HIDDEN**0.5
    save_file({"score.weight": head}, folder / "head.safetensors")
    return folder


def test_the_policies_of_both_placements_sample_the_same_tokens(runs: dict[str, Path]) -> None:
    for step in range(NUM_STEPS):
        tables = [pyarrow.parquet.read_table(run / "rollouts" / f"step_{step:06d}.parquet") for run in runs.values()]
        first, second = ([row.as_py() for row in table["token_ids"]] for table in tables)
        assert first == second, f"step {step}"


@pytest.mark.parametrize("metric", ["actor/loss", "actor/ref_kl", "critic/loss", "critic/value_mean", "reward/mean"])
def test_losses_and_rewards_are_the_same_in_both_placements(runs: dict[str, Path], metric: str) -> None:
    together, apart = _series(runs, metric)
    np.testing.assert_allclose(apart, together, rtol=1e-5, atol=1e-6)
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
