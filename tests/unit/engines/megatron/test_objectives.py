"""Losses and the sums that metrics are made of, against arithmetic by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hybridrl.algos.policy_loss import PolicyLossConfig
from hybridrl.engines.megatron.objectives import Sum, policy_objective, supervised_objective

LOGPROBS = torch.tensor([-1.0, -2.0, -0.5])
ENTROPIES = torch.tensor([0.3, 0.2, 0.1])
VALUES = {
    "loss_weights": torch.tensor([0.5, 0.25, 0.25]),
    "old_logprobs": torch.tensor([-1.0, -1.0, -1.0]),
    "advantages": torch.tensor([1.0, -2.0, 3.0]),
    "segments": torch.tensor([0.0, 0.0, 1.0]),
}
CLIPPED = [-1.0, 2.0 * 0.8, -3.0 * 1.28]
WEIGHTED = sum(w * x for w, x in zip([0.5, 0.25, 0.25], CLIPPED, strict=True))


def test_the_policy_loss_is_weighted_and_clipped_tokens_are_counted():
    loss, sums = policy_objective(PolicyLossConfig(clip_low=0.2, clip_high=0.28))(LOGPROBS, ENTROPIES, VALUES)
    assert loss.item() == pytest.approx(WEIGHTED)
    assert sums[Sum.CLIPPED] == 2 and sums[Sum.TOKENS] == 3 and sums[Sum.REF_KL] == 0
    assert sums[Sum.KL].item() == pytest.approx(0 + 1 - 0.5)
    assert sums[Sum.RATIO].item() == pytest.approx(1 + math.exp(-1) + math.exp(0.5))
    assert sums[Sum.ENTROPY].item() == pytest.approx(0.6)


def test_kl_and_entropy_terms_are_added_with_their_weights():
    ref = LOGPROBS + torch.tensor([0.5, 0.0, -0.5])
    k3 = [math.exp(d) - d - 1 for d in (0.5, 0.0, -0.5)]
    config = PolicyLossConfig(clip_low=0.2, clip_high=0.28, kl_coef=0.1, entropy_coef=0.01)
    loss, sums = policy_objective(config)(LOGPROBS, ENTROPIES, {**VALUES, "ref_logprobs": ref})
    weights, entropies = [0.5, 0.25, 0.25], [0.3, 0.2, 0.1]
    extra = sum(w * (0.1 * k - 0.01 * h) for w, k, h in zip(weights, k3, entropies, strict=True))
    assert loss.item() == pytest.approx(WEIGHTED + extra)
    assert sums[Sum.REF_KL].item() == pytest.approx(sum(k3), rel=1e-6)


def test_a_reference_without_a_kl_weight_is_only_measured():
    loss, sums = policy_objective(PolicyLossConfig(clip_low=0.2, clip_high=0.28))(
        LOGPROBS, ENTROPIES, {**VALUES, "ref_logprobs": LOGPROBS + 1}
    )
    assert loss.item() == pytest.approx(WEIGHTED) and sums[Sum.REF_KL] > 0


def test_the_supervised_loss_is_the_weighted_negative_log_likelihood():
    loss, sums = supervised_objective()(LOGPROBS, ENTROPIES, {"loss_weights": torch.tensor([1.0, 1.0, 2.0])})
    assert loss.item() == pytest.approx(4.0) and sums[Sum.LOSS] == pytest.approx(4.0)
