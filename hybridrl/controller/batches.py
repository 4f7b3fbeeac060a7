"""From samples to frozen batches, and from batches to what a person reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridrl.data.batch import Element, Floats, PolicyBatch, SequenceBatch, ValueBatch, pad_rows
from hybridrl.data.sample import Sample
from hybridrl.observability.records import RolloutRecord

WeighLosses = Callable[[NDArray[np.bool_]], Floats]
"""Loss mask of the global batch of one update -> weights of its token losses."""


AnyBatch = TypeVar("AnyBatch", PolicyBatch, ValueBatch)


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The samples of one step, with their rewards, padded.

    Attributes:
        rewards: [num_samples] float64.
        group_ids: [num_samples] int64; equal for samples of one prompt.
        loss_mask: [num_samples, max_tokens] bool.
        rollout_logprobs: [num_samples, max_tokens] float32.
        policy_versions: [num_samples, max_tokens] int32; -1 where loss_mask is False.
        greedy_rewards: [num_samples] float64 reward of the greedy sample of each one's prompt; None when none were drawn.
    """

    samples: tuple[Sample, ...]
    rewards: NDArray[np.float64]
    group_ids: NDArray[np.int64]
    sequences: SequenceBatch
    loss_mask: NDArray[np.bool_]
    rollout_logprobs: Floats
    policy_versions: NDArray[np.int32]
    greedy_rewards: NDArray[np.float64] | None = None

    @property
    def num_response_tokens(self) -> int:
        """Tokens that the policy produced."""
        return int(self.loss_mask.sum())

    def routed_as(self, routing: NDArray[np.int16]) -> ScoredBatch:
        """Return the batch with the experts that its updates take."""
        return replace(self, sequences=replace(self.sequences, routing=routing))

    def lags(self, version: int) -> NDArray[np.int64]:
        """Return how many versions older than `version` the oldest token of each sample is; 0 for an empty response."""
        oldest = np.array([sample.oldest_version for sample in self.samples], dtype=np.int64)
        return np.where(oldest < 0, 0, version - oldest)


def make_batch(
    samples: Sequence[Sample], rewards: Sequence[float], greedy_rewards: Sequence[float] | None = None
) -> ScoredBatch:
    """Pad samples that were scored."""
    groups = {prompt_id: index for index, prompt_id in enumerate(dict.fromkeys(s.prompt.prompt_id for s in samples))}
    sequences = sequences_of(samples)
    width = sequences.token_ids.shape[1]
    loss_mask = pad_rows([s.loss_mask for s in samples], width, np.bool_)
    versions = pad_rows([s.policy_versions for s in samples], width, np.int32)
    return ScoredBatch(
        samples=tuple(samples),
        rewards=np.array(rewards, dtype=np.float64),
        group_ids=np.array([groups[sample.prompt.prompt_id] for sample in samples], dtype=np.int64),
        sequences=replace(sequences, routing=_routing(samples, width)),
        loss_mask=loss_mask,
        rollout_logprobs=pad_rows([s.rollout_logprobs for s in samples], width, np.float32),
        policy_versions=np.where(loss_mask, versions, -1).astype(np.int32),
        greedy_rewards=None if greedy_rewards is None else np.array(greedy_rewards, dtype=np.float64),
    )


def sequences_of(samples: Sequence[Sample]) -> SequenceBatch:
    """Pad the tokens of samples."""
    lengths = np.array([len(sample.token_ids) for sample in samples], dtype=np.int32)
    return SequenceBatch(pad_rows([s.token_ids for s in samples], int(lengths.max(initial=1)), np.int32), lengths)


def _routing(samples: Sequence[Sample], width: int) -> NDArray[np.int16] | None:
    """Pad the experts that the sampler chose; None when they were not recorded."""
    recorded = [sample.routing for sample in samples if sample.routing is not None]
    if not recorded:
        return None
    routing = np.full((len(samples), width, *recorded[0].shape[1:]), -1, dtype=np.int16)
    for row, sample in enumerate(samples):
        if sample.routing is not None:
            routing[row, : len(sample.routing)] = sample.routing
    return routing


def policy_batch(
    batch: ScoredBatch,
    old_logprobs: Floats,
    ref_logprobs: Floats | None,
    advantages: Floats,
    weigh: WeighLosses,
) -> PolicyBatch:
    """Join everything that an update needs.

    Args:
        old_logprobs: [num_samples, max_tokens].
        ref_logprobs: [num_samples, max_tokens], or None.
        advantages: [num_samples, max_tokens].
    """
    return PolicyBatch(
        sequences=batch.sequences,
        loss_mask=batch.loss_mask,
        rollout_logprobs=batch.rollout_logprobs,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        loss_weights=weigh(batch.loss_mask),
    )


def values_before(values: Floats) -> Floats:
    """Return the value of the state before each token, in which it was chosen, from that of the state after each; 0 before the first.

    Example: 0.1, 0.2, 0.3 become 0, 0.1, 0.2.
    """
    return np.pad(values[:, :-1], ((0, 0), (1, 0)))


def value_batch(
    sequences: SequenceBatch, loss_mask: NDArray[np.bool_], values: Floats, returns: Floats, weigh: WeighLosses
) -> ValueBatch:
    """Join everything that an update of the critic needs.

    Args:
        loss_mask: [num_samples, max_tokens] True where the policy produced the token.
        values: [num_samples, max_tokens] of the state after each token, before the update.
        returns: [num_samples, max_tokens] of the state before each token.
    """
    return ValueBatch(
        sequences=replace(sequences, routing=None),
        loss_mask=_state_before(loss_mask),
        old_values=values,
        returns=_state_before(returns),
        loss_weights=_state_before(weigh(loss_mask)),
    )


def _state_before(of_tokens: NDArray[Element]) -> NDArray[Element]:
    """Move what belongs to a token to the state that it was chosen in, which is that after the token before."""
    return np.pad(of_tokens[:, 1:], ((0, 0), (0, 1)))


def mini_batches(batch: AnyBatch, num_mini_batches: int, weigh: WeighLosses) -> list[AnyBatch]:
    """Cut a batch into consecutive parts, each weighed as a global batch of its own; empty parts are left out.

    Example: 10 rows in 3 mini-batches are rows 0..3, 4..6 and 7..9.
    """
    if num_mini_batches == 1:
        return [batch]
    parts = np.array_split(np.arange(batch.sequences.num_samples), num_mini_batches)
    selected = [batch.select(rows) for rows in parts if len(rows)]
    return [replace(part, loss_weights=weigh(part.loss_mask)) for part in selected]


def rollout_records(batch: ScoredBatch, policy: PolicyBatch) -> list[RolloutRecord]:
    """Return what is written to disk about each sample."""
    lengths = batch.sequences.lengths.tolist()
    return [
        rollout_record(sample, reward, policy.old_logprobs[row, :length], policy.advantages[row, :length])
        for row, (sample, reward, length) in enumerate(zip(batch.samples, batch.rewards.tolist(), lengths, strict=True))
    ]


def rollout_record(sample: Sample, reward: float, old_logprobs: Floats, advantages: Floats) -> RolloutRecord:
    """Return what is written to disk about one sample.

    Args:
        old_logprobs: [num_tokens].
        advantages: [num_tokens].
    """
    return RolloutRecord(
        prompt_id=sample.prompt.prompt_id,
        sample_index=sample.sample_index,
        prompt=sample.prompt.text,
        answer=sample.prompt.answer,
        response=sample.text,
        reward=reward,
        finish_reason=sample.finish_reason.value,
        num_turns=sample.num_turns,
        token_ids=sample.token_ids,
        loss_mask=sample.loss_mask,
        rollout_logprobs=sample.rollout_logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        policy_versions=sample.policy_versions,
        data_source=sample.prompt.data_source,
    )
