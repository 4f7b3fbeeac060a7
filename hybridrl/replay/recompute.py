"""Computes a recorded step again, without a cluster, and compares: rewards -> advantages -> loss weights -> losses.

Each quantity is computed from what was recorded of the ones before it, with the code that the run used, so that the first difference
names the place where something changed. What cannot be computed again is said, never passed over: rewards of a service or a reward model, and
whatever needs a file of the user's own, which is run on request only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from hybridrl.algos.aggregate import loss_weights
from hybridrl.algos.algorithm import Algorithm
from hybridrl.config.choices import RewardFailure
from hybridrl.config.schema import ExperimentConfig
from hybridrl.engines.megatron.objectives import Sum, policy_objective
from hybridrl.replay.replay_step import ReplayStep
from hybridrl.replay.settings import recorded_config, user_files
from hybridrl.rewards.score import make_scorer


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on |got - expected| / (1 + |expected|).

    Attributes:
        exact: Of what the same code computes from the same numbers; another machine may round differently.
        loss: Of sums that the engine made over ranks and micro-batches, in another order.
    """

    exact: float = 1e-6
    loss: float = 1e-5


@dataclass(frozen=True, slots=True)
class Difference:
    """A number that came out otherwise.

    Attributes:
        where: Sample and token, or update.
        got: Computed now.
        expected: Recorded.
    """

    where: str
    got: float
    expected: float


@dataclass(frozen=True, slots=True)
class Check:
    """One quantity, compared.

    Attributes:
        num_different: Numbers out of bounds.
        largest: Largest |got - expected|.
        first: None when all agree.
        skipped: Why it was not computed; empty when it was.
    """

    quantity: str
    num_compared: int = 0
    num_different: int = 0
    largest: float = 0.0
    first: Difference | None = None
    skipped: str = ""


def replay(step: ReplayStep, *, runs_user_files: bool = False, tolerance: Tolerance | None = None) -> list[Check]:
    """Compute the step again.

    Args:
        runs_user_files: Whether Python files that the recorded configuration names may be run.

    Raises:
        DataError: The recorded configuration cannot be read.
    """
    bounds = tolerance or Tolerance()
    config = recorded_config(step)
    files = {} if runs_user_files else user_files(config)
    quantities: tuple[tuple[str, Callable[[ReplayStep, ExperimentConfig, Tolerance], list[Check]]], ...] = (
        ("reward", _rewards),
        ("advantages", _advantages),
        ("loss_weights", _loss_weights),
        ("loss", _losses),
    )
    checks: list[Check] = []
    for name, compute in quantities:
        if name in files:
            checks.append(Check(name, skipped=f"it runs {files[name]}; allow that with --run-files"))
        else:
            checks += compute(step, config, bounds)
    return checks


def _rewards(step: ReplayStep, config: ExperimentConfig, bounds: Tolerance) -> list[Check]:
    reward = config.reward
    if reward.http.weight > 0:
        return [Check("reward", skipped="reward.http is a service, whose answers may change")]
    if reward.model.weight > 0:
        return [Check("reward", skipped="reward.model needs the ranks of a reward model")]
    dropping = replace(reward, on_error=RewardFailure.DROP)
    with contextlib.closing(make_scorer(dropping, config.data.task, step.stop_texts)) as scorer:
        result = scorer.score(step.samples)
    got = np.where(result.is_scored, result.rewards.astype(np.float64), np.nan)
    return [_compare("reward", got, step.rewards, bounds.exact, lambda at: _name(step, at[0]))]


def _advantages(step: ReplayStep, config: ExperimentConfig, bounds: Tolerance) -> list[Check]:
    policy = step.policy
    credit = Algorithm(config.algorithm).credit(
        step.rewards,
        step.group_ids,
        policy.loss_mask,
        policy.rollout_logprobs,
        policy.old_logprobs,
        policy.ref_logprobs,
        step.values,
        step.greedy_rewards,
    )
    checks = [_compare_tokens("advantages", credit.advantages, policy.advantages, step, bounds)]
    if step.returns is not None and credit.returns is not None:
        checks.append(_compare_tokens("returns", credit.returns, step.returns, step, bounds))
    return checks


def _loss_weights(step: ReplayStep, config: ExperimentConfig, bounds: Tolerance) -> list[Check]:
    algorithm, got = config.algorithm, np.zeros_like(step.policy.loss_weights)
    for number in range(len(step.updates)):
        rows = step.update_numbers == number
        mask = step.policy.loss_mask[rows]
        got[rows] = loss_weights(algorithm.loss_aggregation, mask, algorithm.loss_norm_tokens)
    return [_compare_tokens("loss_weights", got, step.policy.loss_weights, step, bounds)]


def _losses(step: ReplayStep, config: ExperimentConfig, bounds: Tolerance) -> list[Check]:
    if config.algorithm.policy_loss.entropy_coef:
        return [Check("loss", skipped="it has an entropy bonus, and the entropy of each token is not recorded")]
    sums = np.array([_update_sums(step, config, number) for number in range(len(step.updates))])
    num_tokens = np.maximum(1.0, sums[:, Sum.TOKENS])
    computed = {
        "loss": sums[:, Sum.LOSS],
        "approx_kl": sums[:, Sum.KL] / num_tokens,
        "clip_fraction": sums[:, Sum.CLIPPED] / num_tokens,
        "ref_kl": sums[:, Sum.REF_KL] / num_tokens,
    }
    return [
        _compare(
            name,
            got,
            np.array([getattr(update, name) for update in step.updates]),
            bounds.loss,
            lambda at: f"update {at[0]}",
        )
        for name, got in computed.items()
    ]


def _update_sums(step: ReplayStep, config: ExperimentConfig, number: int) -> list[float]:
    """Return the sums of one update, by :class:`Sum`, as one micro-batch on one rank makes them."""
    policy = step.policy
    picked = policy.loss_mask & (step.update_numbers == number)[:, None]
    rows = np.broadcast_to(np.arange(len(picked), dtype=np.float32)[:, None], picked.shape)
    arrays = {
        "old_logprobs": policy.old_logprobs,
        "advantages": policy.advantages,
        "loss_weights": policy.loss_weights,
        "segments": rows,
    }
    if policy.ref_logprobs is not None:
        arrays["ref_logprobs"] = policy.ref_logprobs
    values = {name: torch.from_numpy(array[picked]) for name, array in arrays.items()}
    logprobs = torch.from_numpy(step.logprobs[picked])
    _, sums = policy_objective(config.algorithm.policy_loss)(logprobs, torch.zeros_like(logprobs), values)
    totals: list[float] = sums.tolist()
    return totals


def _compare_tokens(
    quantity: str, got: NDArray[np.float32], expected: NDArray[np.float32], step: ReplayStep, bounds: Tolerance
) -> Check:
    """Compare every token that is no padding."""
    is_real = np.arange(expected.shape[1]) < step.policy.sequences.lengths[:, None]
    return _compare(
        quantity,
        np.where(is_real, got, 0.0).astype(np.float64),
        np.where(is_real, expected, 0.0).astype(np.float64),
        bounds.exact,
        lambda at: f"{_name(step, at[0])}, token {at[1]}",
    )


def _compare(
    quantity: str,
    got: NDArray[np.float64],
    expected: NDArray[np.float64],
    bound: float,
    name: Callable[[Sequence[int]], str],
) -> Check:
    """Compare two arrays; what is not finite on one side only is different."""
    gaps = np.abs(got - expected)
    same = (gaps <= bound * (1 + np.abs(expected))) | (np.isnan(got) & np.isnan(expected)) | (got == expected)
    places = np.argwhere(~same)
    first = None
    if len(places):
        at = tuple(int(index) for index in places[0])
        first = Difference(name(at), float(got[at]), float(expected[at]))
    finite = gaps[np.isfinite(gaps)]
    return Check(quantity, got.size, len(places), float(finite.max(initial=0.0)), first)


def _name(step: ReplayStep, row: int) -> str:
    sample = step.samples[row]
    return f"{sample.prompt.prompt_id} sample {sample.sample_index}"
