"""A layer knows its micro-batch, also when the backward pass runs it again."""

from __future__ import annotations

import torch

from hybridrl.engines.megatron.recomputation import MicroBatchCursor


def test_recomputation_takes_micro_batches_up_in_the_order_of_their_first_pass() -> None:
    cursor: MicroBatchCursor[str] = MicroBatchCursor()
    cursor.start(is_training=True)
    for name in ("a", "b"):
        cursor.enter(name)
        with torch.no_grad():
            assert cursor.take() == (name, False)
    assert cursor.num_pending == 2
    assert [cursor.take(), cursor.take()] == [("a", True), ("b", True)]
    assert cursor.num_pending == 0


def test_nothing_is_kept_without_recomputation_or_without_a_backward_pass() -> None:
    cursor: MicroBatchCursor[str] = MicroBatchCursor()
    cursor.start(is_training=True)
    cursor.enter("a")
    assert cursor.take() == ("a", False) and cursor.num_pending == 0
    cursor.start(is_training=False)
    assert cursor.take() == (None, False)
    cursor.enter("b")
    with torch.no_grad():
        assert cursor.take() == ("b", False)
    assert cursor.num_pending == 0
