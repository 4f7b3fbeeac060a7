"""The shipped algorithms pass their checks, and the example of one's own trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridrl.algos.policy_loss import make_policy_loss
from hybridrl.config.choices import AdvantageEstimator, PolicyLossKind
from hybridrl.config.schema import ExperimentConfig, TrainerConfig
from hybridrl.controller.evaluation import Evaluator
from hybridrl.controller.trainer import Trainer
from hybridrl.engines.megatron.objectives import Sum, policy_objective
from hybridrl.preflight.check import load_checked
from hybridrl.preflight.command import Command
from tests.unit.controller.fakes import AlternatingScorer, FakePrompts, FakeRecorder, World
from tests.unit.preflight.experiments import TRAIN, write_experiment, write_model

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
PRESETS = sorted(path.stem for path in (CONFIGS / "algorithms").glob("*.yaml"))
EXAMPLE = CONFIGS / "examples" / "my_algorithm.py"


@pytest.fixture
def example(tmp_path: Path) -> ExperimentConfig:
    """The example's configuration, with a checkpoint of zeros."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(CONFIGS / "demo" / "model", folder)
    write_model(folder, json.loads((folder / "config.json").read_text()))
    path = CONFIGS / "examples" / "my_algorithm.yaml"
    return load_checked(path, [f"model.path={folder}"], Command.TRAIN).config


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_can_be_included(tmp_path: Path, preset: str) -> None:
    path = write_experiment(tmp_path, f"include: {CONFIGS / 'algorithms' / preset}.yaml\n{TRAIN}")
    config = load_checked(path, [], Command.TRAIN).config
    names = {
        config.algorithm.advantage.estimator.value,
        config.algorithm.policy_loss.kind.value,
        "dapo",
        "icepop",
        "ppo",
    }
    assert preset in names


def test_every_estimator_and_loss_of_the_presets_is_documented() -> None:
    page = (CONFIGS.parent / "docs" / "algorithms.md").read_text()
    names = [*(e.value for e in AdvantageEstimator), *(k.value for k in PolicyLossKind), *PRESETS]
    assert [name for name in names if f"`{name}`" not in page and f"{name}.yaml" not in page] == []


def test_the_example_is_short_and_in_the_documentation() -> None:
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= 40
    assert source in (CONFIGS.parent / "docs" / "algorithms.md").read_text()


def test_the_example_trains_with_its_own_advantage(example: ExperimentConfig) -> None:
    world, recorder = World(), FakeRecorder()
    trainer = Trainer(
        TrainerConfig(num_steps=2, eval_every_steps=0),
        example.algorithm,
        actor=world,
        rollout=world,
        weight_sync=world,
        prompts=FakePrompts(),
        scorer=AlternatingScorer(),
        evaluator=Evaluator(world, AlternatingScorer(), []),
        recorder=recorder,
    )
    assert trainer.run().num_steps == 2
    # Rewards 1, 0, 1, 0, ... of 8 samples: each is better, or worse, than 4 of the 7 others.
    batch = world.last_batch
    advantages = batch.advantages[batch.loss_mask].reshape(4, 8, -1)
    expected = np.broadcast_to(np.tile([4 / 7, -4 / 7], 4)[None, :, None], advantages.shape)
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)
    assert recorder.steps[0][1]["groups/zero_advantage"] == 0


def test_the_example_trains_with_its_own_loss(example: ExperimentConfig) -> None:
    config = example.algorithm.policy_loss
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    values = {
        "old_logprobs": torch.tensor([-1.0, -1.0]),
        "advantages": torch.tensor([2.0, -1.0]),
        "loss_weights": torch.tensor([0.5, 0.5]),
        "segments": torch.tensor([0.0, 1.0]),
    }
    loss, sums = policy_objective(config)(logprobs, torch.zeros(2), values)
    loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, 0.5]
    assert loss.item() == 0.0 and sums[Sum.CLIPPED] == 0
    assert make_policy_loss(config).__name__ == "reinforce_loss"
