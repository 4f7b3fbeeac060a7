"""Samples become padded batches whose weights and advantages are right, and records that are not padded."""

from __future__ import annotations

import numpy as np

from hybridrl.algos.aggregate import loss_weights
from hybridrl.config.choices import LossAggregation
from hybridrl.controller.batches import (
    ScoredBatch,
    make_batch,
    mini_batches,
    policy_batch,
    rollout_records,
    value_batch,
    values_before,
)
from tests.unit.controller.fakes import make_prompt, make_sample

A, B = make_prompt("a"), make_prompt("b")


def _weigh(loss_mask: np.ndarray) -> np.ndarray:
    return loss_weights(LossAggregation.TOKEN_MEAN, loss_mask)


def _batch() -> ScoredBatch:
    samples = [
        make_sample(A, 0, 3, num_tokens=2),
        make_sample(A, 1, 4, num_tokens=0),
        make_sample(B, 0, 4, num_tokens=4),
    ]
    return make_batch(samples, [1.0, 0.0, 0.5])


def test_rows_are_padded_on_the_right_and_groups_follow_prompts() -> None:
    batch = _batch()
    assert batch.sequences.token_ids.tolist() == [[5, 6, 7, 8, 0, 0], [5, 6, 0, 0, 0, 0], [5, 6, 7, 8, 9, 10]]
    assert batch.sequences.lengths.tolist() == [4, 2, 6]
    assert batch.loss_mask.sum(1).tolist() == [2, 0, 4]
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.policy_versions[0].tolist() == [-1, -1, 3, 3, -1, -1]
    assert batch.num_response_tokens == 6


def test_the_lag_of_an_empty_response_is_zero() -> None:
    assert _batch().lags(5).tolist() == [2, 0, 1]


def test_weights_reach_exactly_the_tokens_that_the_policy_produced() -> None:
    batch = _batch()
    zeros = np.zeros_like(batch.rollout_logprobs)
    policy = policy_batch(batch, zeros, None, zeros, _weigh)
    np.testing.assert_allclose(policy.loss_weights.sum(), 1.0, rtol=1e-6)
    assert (policy.loss_weights[~policy.loss_mask] == 0).all()


def test_mini_batches_cover_every_row_once_and_are_weighed_each_for_itself() -> None:
    batch = _batch()
    zeros = np.zeros_like(batch.rollout_logprobs)
    policy = policy_batch(batch, zeros, zeros, zeros, _weigh)
    parts = mini_batches(policy, 2, _weigh)
    assert [part.sequences.num_samples for part in parts] == [2, 1]
    assert [round(float(part.loss_weights.sum()), 6) for part in parts] == [1.0, 1.0]
    assert mini_batches(policy, 1, _weigh)[0] is policy
    assert len(mini_batches(policy, 5, _weigh)) == 3


def test_records_are_as_long_as_their_samples() -> None:
    batch = _batch()
    old = np.full_like(batch.rollout_logprobs, -2.0)
    records = rollout_records(batch, policy_batch(batch, old, None, np.ones_like(old), _weigh))
    assert [len(record.old_logprobs) for record in records] == [4, 2, 6]
    assert [record.reward for record in records] == [1.0, 0.0, 0.5]
    assert records[2].prompt_id == "b" and records[2].finish_reason == "stop"


def test_what_belongs_to_a_token_is_learnt_in_the_state_before_it() -> None:
    batch = _batch()
    values = np.arange(18, dtype=np.float32).reshape(3, 6)
    assert values_before(values)[1].tolist() == [0, 6, 7, 8, 9, 10]
    returns = np.where(batch.loss_mask, values_before(values) + 100, 0).astype(np.float32)
    learnt = value_batch(batch.sequences, batch.loss_mask, values, returns, _weigh)
    assert learnt.loss_mask.sum(1).tolist() == [2, 0, 4] and not learnt.loss_mask[:, -1].any()
    assert (learnt.returns - learnt.old_values)[learnt.loss_mask].tolist() == [100.0] * 6
    assert learnt.loss_weights[learnt.loss_mask].tolist() == [np.float32(1 / 6)] * 6
    assert (learnt.loss_mask & (np.arange(6) >= batch.sequences.lengths[:, None] - 1)).sum() == 0
