"""Roles that do not fit their pool, their model or the run are refused with the keys and the way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.preflight.experiments import DENSE, MODEL, write_experiment, write_model
from tests.unit.preflight.test_check import checked, problems

GAE = "algorithm.advantage.estimator=gae"
KL = "algorithm.policy_loss.kl_coef=0.1"
APART = (GAE, "placement.critic=critic")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (GAE, "critic.parallel.tp_size=1", "critic.parallel.ep_size=1"),
            "critic.parallel.tp_size: got 1, expected 2 as in actor.parallel, since placement.critic and placement.actor are both "
            "train and Megatron-core keeps one layout per process; leave it out, or give the role processes of its own, e.g. "
            "with placement.critic: critic",
        ),
        (
            (KL, "reference.parallel.pp_size=4"),
            "reference.parallel.pp_size: got 4, expected 2 as in actor.parallel, since placement.reference and placement.actor "
            "are both train",
        ),
        (
            (*APART, KL, "placement.reference=critic", "critic.parallel.pp_size=1"),
            "critic.parallel.pp_size: got 1, expected 2 as in reference.parallel, since placement.critic and "
            "placement.reference are both critic",
        ),
        (
            (*APART, "critic.parallel.pp_size=3"),
            "critic.parallel.pp_size: got 3, expected a divisor of the model's 4 layers",
        ),
        (
            (*APART, "critic.parallel.tp_size=1"),
            "critic.parallel.ep_size: got ep_size 2 x etp_size 1 = 2, expected a divisor of the ranks of a pipeline stage",
        ),
        (
            (*APART, "critic.parallel.pipeline_layout=Et*4L"),
            "critic.parallel.pipeline_layout: got Et*4L, expected null, since critic.parallel.pp_size is null; set both",
        ),
        (
            (GAE, "critic.micro_batch_tokens=32"),
            "critic.micro_batch_tokens: got 32, expected at least 64, the longest sample (rollout.max_model_tokens)",
        ),
        (
            (*APART, "critic.parallel.dp_size=33"),
            "critic.parallel.dp_size: got 33, expected at most the 32 samples per optimizer step (4 prompts x 8 samples / 1)",
        ),
        (
            (GAE, "critic.warmup_steps=6", "trainer.num_steps=6"),
            "critic.warmup_steps: got 6, expected less than trainer.num_steps = 6, or the actor never learns; lower it",
        ),
        (
            (GAE, "critic.optimizer.schedule=cosine", "critic.optimizer.warmup_steps=6", "trainer.num_steps=6"),
            "critic.optimizer.warmup_steps: got 6, expected less than the run's 6 optimizer step(s)",
        ),
        ((GAE, "critic.model_path=gone"), "critic.model_path: got "),
        (
            ("critic.clip_value=0.1",),
            "critic.clip_value: got a value, expected none: it is not read by an algorithm without",
        ),
        (
            ("placement.critic=side",),
            "placement.critic: got a value, expected none: it is not read by an algorithm without",
        ),
        (
            ("placement.reference=side",),
            "placement.reference: got a value, expected none: it is not read without a KL term",
        ),
        ((GAE, "critic.optimizer.min_lr=1"), "it is not read when critic.optimizer.schedule is constant"),
    ],
)
def test_a_role_that_does_not_fit_is_refused(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    found = problems(write_experiment(tmp_path), *overrides)
    assert any(message in problem for problem in found), found
    assert len(found) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        (GAE, KL),
        (GAE, "critic.parallel.tp_size=2", "critic.parallel.ep_size=2"),
        (*APART, "critic.parallel.tp_size=1", "critic.parallel.ep_size=1", "critic.parallel.pp_size=4"),
        (KL, "placement.reference=side", "reference.parallel.dp_size=2"),
        (*APART, "critic.parallel.dp_size=32"),
    ],
)
def test_roles_that_fit_pass(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    checked(write_experiment(tmp_path), *overrides)


def test_all_problems_of_all_roles_are_listed_at_once(tmp_path: Path) -> None:
    overrides = (GAE, KL, "critic.parallel.tp_size=1", "critic.parallel.ep_size=1", "reference.parallel.dp_size=2")
    found = problems(write_experiment(tmp_path), *overrides, "critic.micro_batch_tokens=8", "critic.warmup_steps=100")
    keys = ["reference.parallel.dp_size", "critic.parallel.tp_size", "critic.micro_batch_tokens", "critic.warmup_steps"]
    assert sorted(problem.split(": ")[1] for problem in found) == sorted(keys)


def test_the_summary_shows_each_pool(tmp_path: Path) -> None:
    summary = checked(write_experiment(tmp_path), *APART, KL, "critic.parallel.pp_size=1").summary().splitlines()
    assert summary[2:4] == [
        "  actor, reference 4 rank(s): tp 2 x pp 2 x cp 1 x dp 1, experts ep 2 x etp 1",
        "  critic   2 rank(s): tp 2 x pp 1 x cp 1 x dp 1, experts ep 2 x etp 1",
    ]


def _critic(tmp_path: Path, model: dict[str, object], num_labels: int = 1) -> str:
    """Write a checkpoint whose value head has `num_labels`; return the override that names it."""
    folder = tmp_path / "critic"
    folder.mkdir()
    write_model(folder, model)
    head = {"score.weight": {"dtype": "BF16", "shape": [num_labels, 32], "data_offsets": [0, 64 * num_labels]}}
    encoded = json.dumps(head).encode()
    content = len(encoded).to_bytes(8, "little") + encoded + bytes(64 * num_labels)
    (folder / "head.safetensors").write_bytes(content)
    return f"critic.model_path={folder}"


def test_a_critic_of_another_architecture_is_checked_against_its_own_sizes(tmp_path: Path) -> None:
    path = write_experiment(tmp_path)
    dense = _critic(tmp_path, DENSE)
    layout = ("critic.parallel.tp_size=2", "critic.parallel.ep_size=1")
    checked(path, *APART, dense, *layout)
    (problem,) = problems(path, GAE, dense)
    assert "critic.parallel.ep_size: got 2, expected 1, since the model has no experts" in problem


def test_a_critic_has_one_label_and_the_vocabulary_of_the_policy(tmp_path: Path) -> None:
    path = write_experiment(tmp_path)
    two = _critic(tmp_path, MODEL, num_labels=2)
    (problem,) = problems(path, GAE, two)
    assert "critic.model_path: got a value head of 2 labels in" in problem and "expected one label" in problem
    shutil.rmtree(tmp_path / "critic")
    (problem,) = problems(path, GAE, _critic(tmp_path, MODEL | {"vocab_size": 80}))
    assert "critic.model_path: got a vocab_size of 80, expected that of model.path, 64" in problem
