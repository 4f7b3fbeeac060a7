"""Every advantage against straight loops over Python floats, and its defined result in degenerate batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from hybridrl.algos.advantage.estimate import ESTIMATORS, estimate_advantages, make_estimator
from hybridrl.algos.advantage.inputs import AdvantageInputs, AdvantagesAndReturns
from hybridrl.config.algorithm import AdvantageConfig
from hybridrl.config.choices import AdvantageEstimator
from hybridrl.errors import ConfigError
from tests.unit.algos.ragged import Ragged, one_turn, ragged, random_cases

EPSILON = 1e-4
NEED_MORE = (AdvantageEstimator.GAE, AdvantageEstimator.REMAX)
FROM_REWARDS = [name for name in ESTIMATORS if name not in NEED_MORE]
Rows = list[list[float]]
IN_GROUPS = [
    AdvantageEstimator.GRPO,
    AdvantageEstimator.DR_GRPO,
    AdvantageEstimator.RLOO,
    AdvantageEstimator.REINFORCE_PP_BASELINE,
]


def _estimate(name: AdvantageEstimator, inputs: AdvantageInputs) -> np.ndarray:
    return estimate_advantages(ESTIMATORS[name], inputs, AdvantageConfig(epsilon=EPSILON)).values


def _totals(inputs: AdvantageInputs) -> list[float]:
    """The reward of each sample less its penalties."""
    return [
        float(reward) - math.fsum(penalties)
        for reward, penalties in zip(inputs.rewards, inputs.kl_penalties, strict=True)
    ]


def _members(totals: list[float], inputs: AdvantageInputs, row: int) -> list[float]:
    return [total for total, group in zip(totals, inputs.group_ids, strict=True) if group == inputs.group_ids[row]]


def _spread(inputs: AdvantageInputs, by_sample: list[float]) -> Rows:
    return [[a if trained else 0.0 for trained in mask] for a, mask in zip(by_sample, inputs.loss_mask, strict=True)]


def _is_flat(values: list[float]) -> bool:
    # Equal up to rounding: sums of penalties are added in another order here.
    return max(values) - min(values) < 1e-12


def _grpo(inputs: AdvantageInputs) -> Rows:
    totals, out = _totals(inputs), []
    for row, total in enumerate(totals):
        members = _members(totals, inputs, row)
        flat = _is_flat(members)
        out.append(0.0 if flat else (total - statistics.mean(members)) / (statistics.stdev(members) + EPSILON))
    return _spread(inputs, out)


def _dr_grpo(inputs: AdvantageInputs) -> Rows:
    totals = _totals(inputs)
    return _spread(inputs, [t - statistics.mean(_members(totals, inputs, row)) for row, t in enumerate(totals)])


def _rloo(inputs: AdvantageInputs) -> Rows:
    totals, out = _totals(inputs), []
    for row, total in enumerate(totals):
        others = [t for i, t in enumerate(totals) if i != row and inputs.group_ids[i] == inputs.group_ids[row]]
        out.append(total - statistics.mean(others) if others else 0.0)
    return _spread(inputs, out)


def _reinforce_pp(inputs: AdvantageInputs) -> Rows:
    num_samples, width = inputs.loss_mask.shape
    returns = {
        (i, t): float(inputs.rewards[i]) - math.fsum(inputs.kl_penalties[i, s] for s in range(t, width))
        for i in range(num_samples)
        for t in range(width)
        if inputs.loss_mask[i, t]
    }
    if not returns or _is_flat(list(returns.values())):
        return [[0.0] * width for _ in range(num_samples)]
    mean, std = statistics.mean(returns.values()), statistics.pstdev(returns.values())
    return [
        [(returns[i, t] - mean) / (std + EPSILON) if (i, t) in returns else 0.0 for t in range(width)]
        for i in range(num_samples)
    ]


def _reinforce_pp_baseline(inputs: AdvantageInputs) -> Rows:
    totals = _totals(inputs)
    centred = [total - statistics.mean(_members(totals, inputs, row)) for row, total in enumerate(totals)]
    scale = statistics.pstdev(centred) + EPSILON
    return _spread(inputs, [value / scale for value in centred])


REFERENCES: dict[AdvantageEstimator, Callable[[AdvantageInputs], Rows]] = {
    AdvantageEstimator.GRPO: _grpo,
    AdvantageEstimator.DR_GRPO: _dr_grpo,
    AdvantageEstimator.RLOO: _rloo,
    AdvantageEstimator.REINFORCE_PP: _reinforce_pp,
    AdvantageEstimator.REINFORCE_PP_BASELINE: _reinforce_pp_baseline,
}


def test_every_estimator_is_ready_or_says_what_it_waits_for() -> None:
    assert ESTIMATORS.keys() == set(AdvantageEstimator)
    assert REFERENCES.keys() == set(FROM_REWARDS)


@pytest.mark.parametrize("name", REFERENCES)
@random_cases
@given(batch=ragged())
def test_advantages_equal_the_reference_on_ragged_batches(name: AdvantageEstimator, batch: Ragged) -> None:
    got = _estimate(name, batch.inputs)
    # float32 of a float64 computation.
    np.testing.assert_allclose(got, REFERENCES[name](batch.inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FROM_REWARDS)
@random_cases
@given(batch=ragged())
def test_advantages_do_not_depend_on_padding_or_on_the_order_of_samples(
    name: AdvantageEstimator, batch: Ragged
) -> None:
    inputs = batch.inputs
    pad = ((0, 0), (2, 3))
    wide = AdvantageInputs(
        inputs.rewards, inputs.group_ids, np.pad(inputs.loss_mask, pad), np.pad(inputs.kl_penalties, pad)
    )
    plain = _estimate(name, inputs)
    np.testing.assert_allclose(_estimate(name, wide)[:, 2:-3], plain, rtol=1e-6, atol=1e-6)
    order = batch.rng.permutation(len(inputs.rewards))
    shuffled = AdvantageInputs(
        inputs.rewards[order], inputs.group_ids[order], inputs.loss_mask[order], inputs.kl_penalties[order]
    )
    np.testing.assert_allclose(_estimate(name, shuffled), plain[order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", IN_GROUPS)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_a_group_of_equal_rewards_gets_exactly_0_and_is_counted(name: AdvantageEstimator, reward: float) -> None:
    inputs = one_turn([reward] * 7 + [0.0, 1.0], [4] * 7 + [9, 9], [3, 1, 2, 3, 1, 1, 1, 2, 1])
    got = estimate_advantages(ESTIMATORS[name], inputs, AdvantageConfig(epsilon=0.0))
    assert (got.values[:7] == 0).all() and (got.values[7:, 0] != 0).all()
    assert (got.num_groups, got.num_zero_groups) == (2, 1)


@pytest.mark.parametrize("name", FROM_REWARDS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 3.5])
def test_a_batch_of_equal_rewards_gets_exactly_0(name: AdvantageEstimator, reward: float) -> None:
    got = estimate_advantages(
        ESTIMATORS[name], one_turn([reward] * 3, [0, 0, 1], [2, 0, 5]), AdvantageConfig(epsilon=0.0)
    )
    assert (got.values == 0).all() and got.num_zero_groups == got.num_groups == 2


@pytest.mark.parametrize("name", FROM_REWARDS)
def test_a_single_sample_gets_exactly_0(name: AdvantageEstimator) -> None:
    got = estimate_advantages(ESTIMATORS[name], one_turn([3.5], [0], [4]), AdvantageConfig(epsilon=0.0))
    assert (got.values == 0).all() and got.num_zero_groups == 1


@pytest.mark.parametrize("name", FROM_REWARDS)
def test_empty_responses_and_batches_without_a_trained_token_get_0(name: AdvantageEstimator) -> None:
    got = _estimate(name, one_turn([1.0, 0.0, 0.5], [0, 0, 0], [2, 0, 1]))
    assert np.isfinite(got).all() and (got[1] == 0).all() and got[0, 0] > 0
    assert (_estimate(name, one_turn([1.0, 0.0], [0, 0], [0, 0])) == 0).all()


def test_worked_examples() -> None:
    assert _estimate(AdvantageEstimator.RLOO, one_turn([1, 0, 0], [0] * 3))[:, 0].tolist() == [1, -0.5, -0.5]
    assert _estimate(AdvantageEstimator.DR_GRPO, one_turn([1, 0, 0, 1], [0] * 4))[:, 0].tolist() == [
        0.5,
        -0.5,
        -0.5,
        0.5,
    ]
    got = _estimate(AdvantageEstimator.GRPO, one_turn([1, 0, 0, 1], [0] * 4))[:, 0]
    np.testing.assert_allclose(got, [0.866, -0.866, -0.866, 0.866], rtol=1e-3)
    got = _estimate(AdvantageEstimator.REINFORCE_PP, one_turn([1, 0], [0, 0], [1, 3]))
    np.testing.assert_allclose(got, [[1.732, 0, 0], [-0.577, -0.577, -0.577]], rtol=1e-3)


def test_remax_compares_with_the_greedy_reward_of_each_prompt() -> None:
    inputs = replace(one_turn([1.0, 0.0, 2.0], [3, 3, 8]), greedy_rewards=np.array([0.25, 0.25, 2.0]))
    assert _estimate(AdvantageEstimator.REMAX, inputs)[:, 0].tolist() == [0.75, -0.25, 0.0]


@random_cases
@given(batch=ragged())
def test_remax_equals_the_reference(batch: Ragged) -> None:
    greedy = batch.rng.normal(size=len(batch.inputs.rewards))
    by_sample = [total - float(baseline) for total, baseline in zip(_totals(batch.inputs), greedy, strict=True)]
    got = _estimate(AdvantageEstimator.REMAX, replace(batch.inputs, greedy_rewards=greedy))
    np.testing.assert_allclose(got, _spread(batch.inputs, by_sample), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            np.zeros(3),
            r"returned shape \[3\], expected \[num_samples\] = \[2\] or \[num_samples, max_tokens\] = \[2, 1\]",
        ),
        (np.array([0.0, math.nan]), r"got nan for sample 1 \(reward 0\), token 0, expected a finite advantage"),
        (np.array([[math.inf], [0.0]]), r"got inf for sample 0 \(reward 1\), token 0"),
    ],
)
def test_a_wrong_answer_of_an_estimator_is_an_error(result: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate_advantages(lambda inputs, config: result, one_turn([1, 0], [0, 0]), AdvantageConfig())


def _with_values(inputs: AdvantageInputs) -> AdvantageInputs:
    return replace(inputs, values=np.zeros(inputs.loss_mask.shape))


def test_returns_are_checked_like_advantages_and_are_0_outside_the_mask() -> None:
    inputs = _with_values(one_turn([1, 0], [0, 0], [1, 2]))
    full = AdvantagesAndReturns(np.ones((2, 2)), np.full((2, 2), 3.0))
    got = estimate_advantages(lambda inputs, config: full, inputs, AdvantageConfig())
    assert got.returns is not None and got.returns.tolist() == [[3, 0], [3, 3]] and got.returns.dtype == np.float32
    broken = replace(full, returns=np.full((2, 2), math.inf))
    with pytest.raises(ConfigError, match=r"got inf for sample 0 \(reward 1\), token 0, expected a finite return"):
        estimate_advantages(lambda inputs, config: broken, inputs, AdvantageConfig())


def test_an_estimator_that_needs_values_must_say_what_the_critic_learns() -> None:
    inputs = _with_values(one_turn([1, 0], [0, 0]))
    with pytest.raises(ConfigError, match="returned nothing for it to learn, expected AdvantagesAndReturns"):
        estimate_advantages(lambda inputs, config: np.zeros(2), inputs, AdvantageConfig())


def test_the_configuration_reaches_the_estimator() -> None:
    config = AdvantageConfig(estimator=AdvantageEstimator.RLOO)
    assert make_estimator(config)(one_turn([1, 0, 0], [0] * 3), config).tolist() == [1, -0.5, -0.5]
