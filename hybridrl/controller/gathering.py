"""Gathers the groups of one step's batch, over one or more rounds of rollouts (dynamic sampling).

A group whose scored samples all have the same reward teaches nothing. With more than one round, such groups are set aside and
the next round asks for as many new prompts as are missing, so no group that teaches is ever left over. When the last round
leaves gaps, groups that were set aside fill them, the earliest first: the batch has its size in every case.

Worked example: 4 prompts, 3 rounds. Round 1 has 1 group set aside, round 2 asks for 1 prompt and sets it aside too, round 3
asks for 1 prompt, which teaches: 4 groups are trained on, 2 were replaced.

Source: DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.controller.batches import ScoredBatch, make_batch
from hybridrl.data.sample import Sample
from hybridrl.observability.records import Metric
from hybridrl.rewards.result import RewardResult

_Group = list[tuple[Sample, float]]


class Gathering:
    """The groups of one batch so far.

    Args:
        num_groups: Groups of a full batch.
        max_rounds: Rounds of rollouts, at most; 1 takes every group as it comes.
    """

    def __init__(self, num_groups: int, max_rounds: int) -> None:
        self._num_groups = num_groups
        self._max_rounds = max_rounds
        self._num_rounds = 0
        self._num_samples = 0
        self._num_scored = 0
        self._taken: list[_Group] = []
        self._set_aside: list[_Group] = []

    def add(self, samples: Sequence[Sample], result: RewardResult) -> None:
        """Take in the scored samples of one round; those without a score are dropped and counted."""
        self._num_rounds += 1
        groups: dict[str, _Group] = {}
        for sample, reward, is_scored in zip(samples, result.rewards, result.is_scored, strict=True):
            group = groups.setdefault(sample.prompt.prompt_id, [])
            if is_scored:
                group.append((sample, float(reward)))
        for group in groups.values():
            teaches = len({reward for _, reward in group}) > 1
            (self._taken if teaches or self._max_rounds == 1 else self._set_aside).append(group)
        self._num_samples += len(samples)
        self._num_scored += sum(map(len, groups.values()))

    @property
    def num_wanted(self) -> int:
        """Prompts to ask for in another round; 0 when the batch is full or the rounds are used up."""
        return self._num_groups - len(self._taken) if self._num_rounds < self._max_rounds else 0

    def batch(self) -> ScoredBatch:
        """Return the batch; without rows when not one sample could be scored."""
        rows = [row for group in [*self._taken, *self._filling()] for row in group]
        return make_batch([sample for sample, _ in rows], [reward for _, reward in rows])

    def metrics(self) -> dict[str, Metric]:
        """Return what was counted, by the names under which it is written."""
        return {
            "samples/dropped": self._num_samples - self._num_scored,
            "groups/replaced": len(self._set_aside) - len(self._filling()),
            "rollout/rounds": self._num_rounds,
        }

    def _filling(self) -> list[_Group]:
        if self._max_rounds == 1:
            return []
        return [group for group in self._set_aside if group][: self._num_groups - len(self._taken)]
