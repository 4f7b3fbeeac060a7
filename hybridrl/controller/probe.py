"""A fixed prompt that both engines score: it shows what checksums cannot.

Checksums prove that the bytes arrived. Whether vLLM computes with them (prepacked copies, scales and other tensors that it derives
from its weights) only a forward pass tells. Each replica continues the prompt, seeded and at the temperature of training, and the actor scores
the very tokens. Replicas and actor hold the same version then, so the two log-probs of a token are the same number up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.config.choices import Precision
from hybridrl.controller.interfaces import WeightDestination, WeightSource
from hybridrl.data.batch import SequenceBatch, pad_rows
from hybridrl.data.generation import Completion
from hybridrl.errors import WeightSyncError
from hybridrl.roles.future import wait_for

NUM_PROBE_TOKENS = 16
"""Tokens that each replica adds to the prompt, and at most as many are taken of the prompt."""

_TOLERANCE = {Precision.FLOAT32: 0.01, Precision.BFLOAT16: 1.0}
"""Rounding alone stays below: 1e-3 was seen in float32; in bfloat16 a router near a tie may pick another expert for a token."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt and how far the engines may differ on what follows it.

    Attributes:
        token_ids: The prompt.
        tolerance: Largest difference of two log-probs of one token, in nats.
    """

    token_ids: tuple[int, ...]
    tolerance: float

    def measure(self, actor: WeightSource, rollout: WeightDestination, version: int, timeout_s: float) -> float:
        """Return the largest difference between the log-probs of any replica and of the actor.

        Raises:
            WeightSyncError: It exceeds the tolerance or is not a number; names the replica's place in the role and the token.
            EngineError: A rank failed or did not answer in time.
        """
        completions = wait_for(rollout.probe(self.token_ids, NUM_PROBE_TOKENS, timeout_s))
        scored = wait_for(actor.logprobs(self._batch(completions, actor.dp_size))).logprobs
        worst = 0.0
        for replica, (completion, row) in enumerate(zip(completions, scored, strict=False)):
            own = row[len(self.token_ids) :][: len(completion.token_ids)]
            gaps = np.abs(np.array(completion.logprobs, dtype=np.float64) - own)
            token = int(gaps.argmax())  # the first that is not a number, if any is
            if not gaps[token] <= self.tolerance:
                raise self._error(version, replica, token, completion.logprobs[token], float(own[token]))
            worst = max(worst, float(gaps[token]))
        return worst

    def _batch(self, completions: Sequence[Completion], dp_size: int) -> SequenceBatch:
        """Return one row per completion, all repeated so that every data-parallel rank has as many."""
        rows = [np.array([*self.token_ids, *c.token_ids], dtype=np.int32) for c in completions] * dp_size
        lengths = np.array([len(row) for row in rows], dtype=np.int32)
        return SequenceBatch(pad_rows(rows, int(lengths.max()), np.int32), lengths)

    def _error(self, version: int, replica: int, token: int, sampler: float, trainer: float) -> WeightSyncError:
        return WeightSyncError(
            f"probe of version {version}: log-prob of token {token} after the probe prompt differs by {abs(sampler - trainer):.3g}, "
            f"expected at most {self.tolerance:g} (weight_sync.probe_tolerance): sampler {sampler:.6g} (replica {replica} of those "
            f"connected), trainer {trainer:.6g}. The checksums agreed, so the weights arrived, but the two engines do not compute the "
            "same model with them: vLLM may use tensors that it derived from older weights, or a kernel or an option differs. Load "
            "an export of this checkpoint into a fresh vLLM: if that agrees with the trainer, the update path is at fault, otherwise "
            "the model is. If only rounding differs (bfloat16, large models), raise weight_sync.probe_tolerance"
        )


def make_probe(
    token_ids: Sequence[int], tolerance: float | None, precisions: Sequence[Precision], max_model_tokens: int
) -> Probe:
    """Make the probe of a run.

    Args:
        token_ids: Of a prompt; the first tokens are used.
        tolerance: ``weight_sync.probe_tolerance``; None takes what the coarsest of `precisions` allows.
        max_model_tokens: Of a replica; leaves room for at least one token.
    """
    num_tokens = min(NUM_PROBE_TOKENS, max_model_tokens - 1)
    limit = max(_TOLERANCE[precision] for precision in precisions) if tolerance is None else tolerance
    return Probe(tuple(token_ids[:num_tokens]), limit)
