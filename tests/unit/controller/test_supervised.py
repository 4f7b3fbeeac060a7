"""The supervised loop on fakes: whole batches, mean weights, one record per step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hybridrl.controller.supervised import train_supervised
from hybridrl.data.batch import Floats, SequenceBatch
from hybridrl.data.demonstrations import Demonstration
from hybridrl.data.stream import Stream
from tests.unit.controller.fakes import FakeFuture, FakeRecorder, FakeUpdate


class Counting:
    """Demonstration n has n % 3 + 1 prompt tokens and 2 learnt ones."""

    num_items = None

    def at(self, position: int) -> Demonstration:
        num_prompt = position % 3 + 1
        mask = np.array([False] * num_prompt + [True] * 2)
        return Demonstration(np.full(num_prompt + 2, position + 1, dtype=np.int32), mask)


@dataclass
class Actor:
    batches: list[tuple[SequenceBatch, Floats]] = field(default_factory=list)

    def update_supervised(self, batch: SequenceBatch, loss_weights: Floats) -> FakeFuture[FakeUpdate]:
        self.batches.append((batch, loss_weights))
        return FakeFuture(lambda: FakeUpdate(loss=2.0))


def test_every_step_takes_the_next_demonstrations_and_averages_over_learnt_tokens() -> None:
    actor, recorder = Actor(), FakeRecorder()
    train_supervised(actor, Stream(Counting()), recorder, num_steps=2, samples_per_step=4)
    first, second = actor.batches
    assert first[0].token_ids[:, 0].tolist() == [1, 2, 3, 4]
    assert second[0].token_ids[:, 0].tolist() == [5, 6, 7, 8]
    assert first[0].lengths.tolist() == [3, 4, 5, 3]
    assert (first[1] > 0).sum() == 8 and np.isclose(first[1].sum(), 1.0)
    assert [step for step, _, _ in recorder.steps] == [0, 1]
    assert recorder.steps[0][1]["sft/loss"] == 2.0
