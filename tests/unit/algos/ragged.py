"""Random ragged batches: several turns a sample, empty responses, groups of any size in any order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from hybridrl.algos.advantage.inputs import AdvantageInputs


@dataclass(frozen=True)
class Ragged:
    """Arrays of [num_samples, max_tokens] with nonsense outside the mask, where nothing may look."""

    inputs: AdvantageInputs
    values: np.ndarray
    rng: np.random.Generator

    @property
    def mask(self) -> np.ndarray:
        return self.inputs.loss_mask

    def floats(self, scale: float) -> np.ndarray:
        """Random numbers at the tokens of the mask, and huge ones elsewhere."""
        return np.where(self.mask, self.rng.normal(0, scale, self.mask.shape), 1e6)


def make_ragged(seed: int, num_samples: int, width: int, num_groups: int) -> Ragged:
    rng = np.random.default_rng(seed)
    mask = rng.random((num_samples, width)) < rng.choice([0.0, 0.4, 0.9], (num_samples, 1))
    penalties = np.where(mask, rng.normal(0, 0.3, mask.shape), 0.0)
    rewards = rng.integers(-2, 3, num_samples) / 2
    groups = rng.integers(0, num_groups, num_samples) * 7 - 3
    values = np.where(mask, rng.normal(0, 1, mask.shape), np.nan)
    return Ragged(AdvantageInputs(rewards.astype(float), groups, mask, penalties), values, rng)


def ragged() -> st.SearchStrategy[Ragged]:
    return st.builds(make_ragged, st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 8), st.integers(1, 4))


def one_turn(rewards: list[float], groups: list[int], lengths: list[int] | None = None) -> AdvantageInputs:
    """Samples of one turn without a KL penalty."""
    lengths = lengths or [1] * len(rewards)
    mask = np.arange(max([1, *lengths])) < np.array(lengths)[:, None]
    return AdvantageInputs(np.array(rewards, dtype=float), np.array(groups), mask, np.zeros(mask.shape))


# No deadline: on a busy machine one example may take long. Fewer examples than the default, as each is a whole batch.
random_cases = settings(deadline=None, max_examples=50)
