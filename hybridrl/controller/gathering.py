"""Gathers the groups of one step's batch, over one or more rounds of rollouts (dynamic sampling).

A group whose scored samples all have the same reward teaches nothing. With more than one round, such groups are set aside and
the next round asks for as many new prompts as are missing, so no group that teaches is ever left over. When the last round
leaves gaps, groups that were set aside fill them, the earliest first: the batch has its size in every case.

Worked example: 4 prompts, 3 rounds. Round 1 has 1 group set aside, round 2 asks for 1 prompt and sets it aside too, round 3
asks for 1 prompt, which teaches: 4 groups are trained on, 2 were replaced.

A greedy sample is the baseline of its group and no member of it. Without its reward the group cannot be trained on.

Source: DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridrl.controller.batches import ScoredBatch, make_batch
from hybridrl.data.sample import Sample
from hybridrl.observability.records import Metric
from hybridrl.rewards.result import RewardResult


@dataclass(slots=True)
class _Group:
    """The scored samples of one prompt."""

    samples: list[Sample] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    greedy_reward: float | None = None

    @property
    def teaches(self) -> bool:
        """Whether rewards differ, from each other or from the baseline."""
        baseline = [] if self.greedy_reward is None else [self.greedy_reward]
        return bool(self.rewards) and len({*self.rewards, *baseline}) > 1


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
            group = groups.setdefault(sample.prompt.prompt_id, _Group())
            if is_scored and sample.is_greedy:
                group.greedy_reward = float(reward)
            elif is_scored:
                group.samples.append(sample)
                group.rewards.append(float(reward))
        without_baseline = {s.prompt.prompt_id for s in samples if s.is_greedy} - {
            name for name, group in groups.items() if group.greedy_reward is not None
        }
        for name, group in groups.items():
            kept = _Group() if name in without_baseline else group
            (self._taken if kept.teaches or self._max_rounds == 1 else self._set_aside).append(kept)
            self._num_scored += len(kept.samples)
        self._num_samples += sum(not sample.is_greedy for sample in samples)

    @property
    def num_wanted(self) -> int:
        """Prompts to ask for in another round; 0 when the batch is full or the rounds are used up."""
        return self._num_groups - len(self._taken) if self._num_rounds < self._max_rounds else 0

    def batch(self) -> ScoredBatch:
        """Return the batch; without rows when not one sample could be scored."""
        groups = [*self._taken, *self._filling()]
        samples = [sample for group in groups for sample in group.samples]
        rewards = [reward for group in groups for reward in group.rewards]
        baselines = [group.greedy_reward for group in groups for _ in group.samples]
        known = [reward for reward in baselines if reward is not None]
        return make_batch(samples, rewards, known if len(known) == len(samples) else None)

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
        return [group for group in self._set_aside if group.samples][: self._num_groups - len(self._taken)]
