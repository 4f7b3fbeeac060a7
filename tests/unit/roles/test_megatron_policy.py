"""How the answers of the ranks to an update become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hybridrl.config.algorithm import PolicyLossConfig
from hybridrl.data.batch import PolicyBatch, SequenceBatch
from hybridrl.engines.megatron.results import UpdateMetrics
from hybridrl.roles.dispatch import Dispatch
from hybridrl.roles.megatron_policy import MegatronActor

NUM_ROWS, WIDTH = 5, 3


def update_of(batch: PolicyBatch, logprobs: np.ndarray | None) -> UpdateMetrics:
    return UpdateMetrics(
        loss=0.5, grad_norm=1.0, entropy=0.5, lr=1e-3, approx_kl=0.0, clip_fraction=0.0, ratio_mean=1.0, ref_kl=0.0,
        num_tokens=NUM_ROWS * WIDTH, is_skipped=False, num_skipped=0, logprobs=logprobs,
    )  # fmt: skip


@dataclass
class TwoDataParallelRanks:
    """A pool and its group in one, whose ranks answer at once: with old_logprobs, when log-probs are wanted."""

    dp_size: int = 2
    dp_ranks: tuple[int, ...] = (0, 1)
    timeouts: Any = field(default_factory=lambda: type("Timeouts", (), {"train_timeout_s": 1.0}))

    def group(self, role: object) -> TwoDataParallelRanks:
        return self

    def call(
        self, method: str, dispatch: Dispatch, combine: Callable[[list[Any]], Any], *, phase: str, timeout_s: float
    ) -> Any:
        return combine(
            [update_of(part, part.old_logprobs if wants else None) for part, _, _, wants in dispatch.arguments]
        )


@pytest.mark.parametrize("wants", [False, True])
def test_logprobs_of_an_update_come_in_batch_order_where_they_are_wanted(wants: bool) -> None:
    numbers = np.arange(NUM_ROWS * WIDTH, dtype=np.float32).reshape(NUM_ROWS, WIDTH)
    lengths = np.array([3, 1, 2, 3, 1], dtype=np.int32)
    batch = PolicyBatch(
        SequenceBatch(numbers.astype(np.int32), lengths), numbers > 0, numbers, numbers, None, numbers, numbers
    )
    actor = MegatronActor(
        TwoDataParallelRanks(), lambda lengths: lengths.astype(np.float64), temperature=1.0, loss=PolicyLossConfig()
    )
    update: Any = actor.update(batch, want_logprobs=wants)
    assert update.loss == 0.5
    assert np.array_equal(update.logprobs, numbers) if wants else update.logprobs is None
