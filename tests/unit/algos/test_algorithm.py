"""The whole algorithm: penalties, advantages and weights together, and a loss that no split of the batch changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algos.algorithm import Algorithm, Credit
from hybridrl.algos.policy_loss import PolicyTokens, make_policy_loss
from hybridrl.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    OverlongConfig,
    PolicyLossConfig,
    RewardKlConfig,
    RolloutCorrectionConfig,
)
from hybridrl.config.choices import AdvantageEstimator, CorrectionMethod, LossAggregation, OldPolicy, PolicyLossKind
from tests.unit.algos.ragged import Ragged, ragged, random_cases

DR_GRPO = AdvantageConfig(estimator=AdvantageEstimator.DR_GRPO)
MASK = np.array([[False, True, True, False], [False, True, True, True]])
ZEROS = np.zeros(MASK.shape, dtype=np.float32)


def _credit(config: AlgorithmConfig, rollout: np.ndarray = ZEROS, ref: np.ndarray | None = None) -> Credit:
    return Algorithm(config).credit(np.array([1.0, 0.0]), np.array([0, 0]), MASK, rollout, ZEROS, ref)


def test_every_token_of_a_sample_gets_its_advantage_and_nothing_else_does() -> None:
    credit = _credit(AlgorithmConfig(advantage=DR_GRPO))
    assert credit.advantages.tolist() == [[0, 0.5, 0.5, 0], [0, -0.5, -0.5, -0.5]]
    assert credit.advantages.dtype == np.float32
    assert credit.metrics == {
        "groups/zero_advantage": 0,
        "reward/overlong_penalty_mean": 0.0,
        "correction/effective_samples": 1.0,
        "correction/clip_fraction": 0.0,
    }


def test_importance_weights_multiply_advantages_and_are_measured() -> None:
    rollout = np.where(np.arange(4) == 1, -np.log(3.0), 0.0).astype(np.float32)[None].repeat(2, axis=0)
    credit = _credit(AlgorithmConfig(advantage=DR_GRPO), rollout)
    np.testing.assert_allclose(credit.advantages, [[0, 1, 0.5, 0], [0, -1, -0.5, -0.5]])
    assert credit.metrics["correction/clip_fraction"] == pytest.approx(2 / 5)
    assert credit.metrics["correction/effective_samples"] == pytest.approx(49 / (5 * 11))
    masked = RolloutCorrectionConfig(method=CorrectionMethod.MASK)
    credit = _credit(AlgorithmConfig(advantage=DR_GRPO, rollout_correction=masked), rollout)
    np.testing.assert_allclose(credit.advantages, [[0, 0, 0.5, 0], [0, 0, -0.5, -0.5]])


def test_overlong_samples_earn_less() -> None:
    overlong = OverlongConfig(max_tokens=3, penalty=0.5)
    credit = _credit(AlgorithmConfig(advantage=DR_GRPO, overlong=overlong))
    assert credit.advantages[:, 1].tolist() == [0.75, -0.75]
    assert credit.metrics["reward/overlong_penalty_mean"] == 0.25


def test_the_kl_to_the_reference_is_taken_off_the_reward_with_a_weight_that_adapts() -> None:
    kl = RewardKlConfig(coef=0.5, target=1.0, horizon_samples=10)
    config = AlgorithmConfig(advantage=DR_GRPO, reward_kl=kl)
    algorithm = Algorithm(config)
    assert algorithm.needs_reference and not Algorithm(AlgorithmConfig()).needs_reference
    ref = np.where(MASK & (np.arange(2)[:, None] == 1), -1.0, 0.0).astype(np.float32)
    arguments = (np.array([1.0, 0.0]), np.array([0, 0]), MASK, ZEROS, ZEROS, ref)
    first = algorithm.credit(*arguments)
    # The second sample pays 0.5 at each of three tokens: rewards 1 and -1.5.
    np.testing.assert_allclose(first.advantages[:, 1], [1.25, -1.25])
    assert first.metrics["reward/kl_mean"] == pytest.approx(0.6) and first.metrics["reward/kl_coef"] == 0.5
    assert algorithm.credit(*arguments).metrics["reward/kl_coef"] == pytest.approx(0.5 * (1 - 0.2 * 2 / 10))


def test_bypass_needs_no_log_probs_of_the_trainer() -> None:
    config = AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(old_policy=OldPolicy.BYPASS))
    assert not Algorithm(config).needs_old_logprobs and Algorithm(AlgorithmConfig()).needs_old_logprobs


def test_a_loss_of_ones_own_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "my_loss.py"
    file.write_text(
        "from hybridrl.algos.policy_loss import TokenLoss\n\n\n"
        "def my_loss(tokens, config):\n"
        "    return TokenLoss(-tokens.advantages * tokens.logprobs, tokens.advantages > 1e9)\n"
    )
    loss = make_policy_loss(PolicyLossConfig(path=str(file), name="my_loss"))
    tokens = PolicyTokens(torch.tensor([-2.0]), torch.zeros(1), torch.tensor([3.0]), torch.zeros(1))
    assert loss(tokens, PolicyLossConfig()).loss.tolist() == [6.0]


def _loss_and_gradient(config: AlgorithmConfig, batch: Ragged, parts: list[np.ndarray]) -> tuple[float, np.ndarray]:
    """Sum the loss over parts of the rows, each a micro-batch of some rank with its own numbers for sequences."""
    rng = np.random.default_rng(0)
    logprobs = torch.tensor(rng.normal(-1, 0.5, batch.mask.shape), requires_grad=True)
    old, advantages = (torch.tensor(rng.normal(m, 0.5, batch.mask.shape)) for m in (-1, 0))
    weights = torch.tensor(Algorithm(config).loss_weights(batch.mask), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts:
        row, token = np.nonzero(batch.mask[rows])
        at = (torch.from_numpy(rows[row]), torch.from_numpy(token))
        tokens = PolicyTokens(logprobs[at], old[at], advantages[at], torch.from_numpy(row).float())
        result = make_policy_loss(config.policy_loss)(tokens, config.policy_loss)
        total = total + (weights[at] * result.loss).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.item(), gradient.numpy()


@pytest.mark.parametrize("kind", PolicyLossKind)
@random_cases
@given(batch=ragged(), aggregation=st.sampled_from(LossAggregation), num_parts=st.integers(2, 4))
def test_no_split_into_ranks_and_micro_batches_changes_the_loss_or_its_gradient(
    kind: PolicyLossKind, batch: Ragged, aggregation: LossAggregation, num_parts: int
) -> None:
    config = AlgorithmConfig(
        loss_aggregation=aggregation, loss_norm_tokens=7, policy_loss=PolicyLossConfig(kind=kind, clip_low=0.1)
    )
    rows = np.arange(len(batch.mask))
    loss, gradient = _loss_and_gradient(config, batch, [rows])
    consecutive = list(np.array_split(rows, num_parts))
    dealt = [rows[part::num_parts] for part in range(num_parts)]
    for parts in (consecutive, dealt):
        again, gradient_again = _loss_and_gradient(config, batch, parts)
        assert again == pytest.approx(loss, rel=1e-9, abs=1e-12)
        np.testing.assert_allclose(gradient_again, gradient, rtol=1e-9, atol=1e-12)
    wide = replace(batch, inputs=replace(batch.inputs, loss_mask=np.pad(batch.mask, ((0, 3), (0, 0)))))
    assert (
        Algorithm(config).loss_weights(wide.mask)[: len(rows)].tolist()
        == Algorithm(config).loss_weights(batch.mask).tolist()
    )
