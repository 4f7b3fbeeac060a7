"""Which micro-batch a layer works on, also when activation recomputation runs the layer again.

Recomputation runs a layer a second time during the backward pass, when other micro-batches have passed in between. The layer
then takes up its micro-batches in the order in which it met them first, which is the order of every schedule of Megatron-core.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class MicroBatchCursor(Generic[T]):
    """What one layer has to know of the micro-batch at hand.

    Recomputed layers run without gradients first and with them when they are repeated.
    """

    def __init__(self) -> None:
        self._current: T | None = None
        self._pending: deque[T] = deque()
        self._is_training = False

    @property
    def num_pending(self) -> int:
        """Micro-batches whose layer is yet to be recomputed."""
        return len(self._pending)

    def start(self, *, is_training: bool) -> None:
        """Forget all micro-batches; `is_training` says whether a backward pass belongs to the next ones."""
        self._current, self._is_training = None, is_training
        self._pending.clear()

    def enter(self, value: T) -> None:
        """Set what the next forward pass of the layer takes."""
        self._current = value

    def take(self) -> tuple[T | None, bool]:
        """Return the value of the micro-batch that runs now, and whether this pass repeats an earlier one."""
        if torch.is_grad_enabled() and self._pending:
            return self._pending.popleft(), True
        if self._current is not None and self._is_training and not torch.is_grad_enabled():
            self._pending.append(self._current)
        return self._current, False
