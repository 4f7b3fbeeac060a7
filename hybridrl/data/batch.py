"""Batches that cross from the controller to training ranks: frozen, numpy, aligned to token positions.

Log-probs have four names that never mix: rollout_logprobs (sampler), old_logprobs (actor before the update),
ref_logprobs (reference), logprobs (actor during the update).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Element = TypeVar("Element", bound=np.generic)


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Right-padded token sequences.

    Attributes:
        token_ids: [num_samples, max_tokens] int32, padded with 0.
        lengths: [num_samples] int32; real tokens of each row.
        routing: [num_samples, max_tokens, num_moe_layers, top_k] int16 experts to replay, -1 where the router is free; None to
            replay none.
    """

    token_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    routing: NDArray[np.int16] | None = None

    @property
    def num_samples(self) -> int:
        """Number of rows."""
        return int(self.token_ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding."""
        return int(self.lengths.sum())

    def select(self, rows: NDArray[np.int64]) -> SequenceBatch:
        """Return the given rows, in that order."""
        routing = None if self.routing is None else self.routing[rows]
        return SequenceBatch(self.token_ids[rows], self.lengths[rows], routing)


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """What one policy update needs. All per-token arrays are [num_samples, max_tokens].

    Attributes:
        loss_mask: bool; True where the policy produced the token.
        rollout_logprobs: float32, from the sampler.
        old_logprobs: float32, from the actor before the update.
        ref_logprobs: float32 from the reference, or None when no KL term is used.
        advantages: float32.
        loss_weights: float32; weight of each token's loss. The global batch's loss is their weighted sum, so the
            aggregation (token mean, sequence mean, ...) is decided once, before any split into ranks and micro-batches.
    """

    sequences: SequenceBatch
    loss_mask: NDArray[np.bool_]
    rollout_logprobs: Floats
    old_logprobs: Floats
    ref_logprobs: Floats | None
    advantages: Floats
    loss_weights: Floats

    def select(self, rows: NDArray[np.int64]) -> PolicyBatch:
        """Return the given rows, in that order."""
        return PolicyBatch(
            sequences=self.sequences.select(rows),
            loss_mask=self.loss_mask[rows],
            rollout_logprobs=self.rollout_logprobs[rows],
            old_logprobs=self.old_logprobs[rows],
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[rows],
            advantages=self.advantages[rows],
            loss_weights=self.loss_weights[rows],
        )


@dataclass(frozen=True, slots=True)
class ValueBatch:
    """What one update of a critic needs. All per-token arrays are [num_samples, max_tokens].

    Entry t belongs to the state after token t, which the model's output there values. So the value of the state that the policy
    chose token t in is entry t - 1.

    Attributes:
        loss_mask: bool; True where the value is trained.
        old_values: float32, from the critic before the update.
        returns: float32; what the values shall become.
        loss_weights: float32; as in :class:`PolicyBatch`.
    """

    sequences: SequenceBatch
    loss_mask: NDArray[np.bool_]
    old_values: Floats
    returns: Floats
    loss_weights: Floats

    def select(self, rows: NDArray[np.int64]) -> ValueBatch:
        """Return the given rows, in that order."""
        return ValueBatch(
            sequences=self.sequences.select(rows),
            loss_mask=self.loss_mask[rows],
            old_values=self.old_values[rows],
            returns=self.returns[rows],
            loss_weights=self.loss_weights[rows],
        )


def pad_rows(rows: Sequence[NDArray[Element]], width: int, dtype: type[Element]) -> NDArray[Element]:
    """Stack ragged rows into [len(rows), width], padded with 0 on the right."""
    out = np.zeros((len(rows), width), dtype=dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out
