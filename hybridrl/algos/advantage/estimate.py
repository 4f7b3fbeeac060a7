"""Advantages by name: the one dispatch from the configuration to an estimator.

An estimator is a function of the type :data:`hybridrl.algos.advantage.inputs.Estimator`: one small file and one line in the
table below, or a file of the user's that the configuration names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybridrl.algos.advantage.dr_grpo import dr_grpo
from hybridrl.algos.advantage.gae import gae
from hybridrl.algos.advantage.grpo import grpo
from hybridrl.algos.advantage.inputs import AdvantageInputs, AdvantagesAndReturns, Estimator
from hybridrl.algos.advantage.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from hybridrl.algos.advantage.remax import remax
from hybridrl.algos.advantage.rloo import rloo
from hybridrl.config.algorithm import AdvantageConfig
from hybridrl.config.choices import AdvantageEstimator
from hybridrl.config.user_function import FunctionReference, load_function
from hybridrl.errors import ConfigError

ESTIMATORS: dict[AdvantageEstimator, Estimator] = {
    AdvantageEstimator.GRPO: grpo,
    AdvantageEstimator.DR_GRPO: dr_grpo,
    AdvantageEstimator.RLOO: rloo,
    AdvantageEstimator.REINFORCE_PP: reinforce_pp,
    AdvantageEstimator.REINFORCE_PP_BASELINE: reinforce_pp_baseline,
    AdvantageEstimator.REMAX: remax,
    AdvantageEstimator.GAE: gae,
}


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of a batch, and what was counted.

    Attributes:
        values: [num_samples, max_tokens] float32, finite; 0 outside the mask.
        num_groups: Groups of samples of one prompt.
        num_zero_groups: Groups that teach nothing, because all their advantages are exactly 0.
        returns: [num_samples, max_tokens] float32, finite, what the critic learns; None of an estimator without one.
    """

    values: NDArray[np.float32]
    num_groups: int
    num_zero_groups: int
    returns: NDArray[np.float32] | None = None


def make_estimator(config: AdvantageConfig) -> Estimator:
    """Return the estimator that the configuration names; a user's file is run."""
    if config.path is not None and config.name is not None:
        return load_function(FunctionReference(Path(config.path), config.name))
    return ESTIMATORS[config.estimator]


def estimate_advantages(estimator: Estimator, inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Run an estimator and check what it returns.

    Raises:
        ConfigError: When it returns something of another shape, a value that is not finite, or nothing for the critic to learn.
    """
    result = estimator(inputs, config)
    returns = None
    if isinstance(result, AdvantagesAndReturns):
        returns = _by_token("return", result.returns, inputs).astype(np.float32)
        result = result.advantages
    elif inputs.values is not None:
        raise ConfigError(
            "algorithm.advantage: the estimator needs a critic but returned nothing for it to learn, expected AdvantagesAndReturns"
        )
    by_token = _by_token("advantage", result, inputs)
    groups = np.unique(inputs.group_ids)
    num_taught = len(np.unique(inputs.group_ids[by_token.any(axis=1)]))
    return Advantages(by_token.astype(np.float32), len(groups), len(groups) - num_taught, returns)


def _by_token(what: str, values: NDArray[np.float64], inputs: AdvantageInputs) -> NDArray[np.float64]:
    """Return [num_samples, max_tokens], 0 outside the mask, of values by sample or by token."""
    mask, values = inputs.loss_mask, np.asarray(values, dtype=np.float64)
    if values.shape not in (mask.shape[:1], mask.shape):
        expected = f"[num_samples] = {list(mask.shape[:1])} or [num_samples, max_tokens] = {list(mask.shape)}"
        raise ConfigError(
            f"algorithm.advantage: the estimator returned shape {list(values.shape)}, expected {expected}"
        )
    by_token = np.where(mask, values[:, None] if values.ndim == 1 else values, 0.0)
    if not np.isfinite(by_token).all():
        row, token = (int(index) for index in np.argwhere(~np.isfinite(by_token))[0])
        where = f"sample {row} (reward {inputs.rewards[row]:g}), token {token}"
        raise ConfigError(f"algorithm.advantage: got {by_token[row, token]} for {where}, expected a finite {what}")
    return by_token
