"""The part of a recorded configuration that decides rewards, advantages and losses."""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml

from hybridrl.config.load import read_draft
from hybridrl.config.schema import ExperimentConfig
from hybridrl.errors import DataError
from hybridrl.replay.replay_step import ReplayStep


def recorded_config(step: ReplayStep) -> ExperimentConfig:
    """Return the configuration with the recorded algorithm, reward and task, and defaults elsewhere.

    The weight of a KL penalty is the one of that step.

    Raises:
        DataError: A key or value of these sections is unknown to this version of HybridRL.
    """
    recorded = yaml.safe_load(step.config_text)
    try:
        sections = {
            "name": "replay",
            "model": {"path": "unused"},
            "data": {"task": recorded["data"]["task"]},
            "reward": recorded["reward"],
            "algorithm": recorded["algorithm"],
        }
    except (KeyError, TypeError) as e:
        raise DataError(f"recorded configuration: has no {e}, expected the sections data, reward and algorithm") from e
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(sections, allow_unicode=True), encoding="utf-8")
        draft = read_draft(path)
    if draft.problems:
        raise DataError(
            "\n".join(["recorded configuration: this version of HybridRL does not know it", *draft.problems])
        )
    if step.reward_kl_coef is not None:
        draft.config.algorithm.reward_kl.coef = step.reward_kl_coef
    return draft.config


def user_files(config: ExperimentConfig) -> dict[str, str]:
    """Return what runs code that came from elsewhere, by the quantity that it decides."""
    algorithm, reward = config.algorithm, config.reward
    files = {"reward": reward.function, "advantages": algorithm.advantage.path, "loss": algorithm.policy_loss.path}
    if reward.code.weight > 0:
        files["reward"] = "the programs that the policy wrote"
    return {quantity: path for quantity, path in files.items() if path is not None}
