"""The training engine of critics and reward models: values instead of log-probs.

Entry t of all per-token arrays belongs to the state after token t, where the model's output stands.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridrl.algos.loss.value import value_loss
from hybridrl.data.batch import SequenceBatch, ValueBatch
from hybridrl.engines.megatron.engine import MegatronEngine
from hybridrl.engines.megatron.micro_batches import scatter_back
from hybridrl.engines.megatron.objectives import Values
from hybridrl.engines.megatron.optimizer import StepResult
from hybridrl.engines.megatron.pipeline import LossFunction
from hybridrl.engines.megatron.results import ValueMetrics
from hybridrl.errors import EngineError
from hybridrl.layout.checkpoint import read_checkpoint_index
from hybridrl.layout.model import ModelSpec, ValueHead
from hybridrl.layout.shard import ShardMap
from hybridrl.layout.value_model import backbone
from hybridrl.reshard.checkpoint import load_checkpoint

_log = logging.getLogger(__name__)


class ValueEngine(MegatronEngine):
    """A model whose spec has a value head; see :func:`hybridrl.layout.value_model.read_value_model_spec`.

    Args:
        spec: With a value head of one label.

    Raises:
        EngineError: When the head is missing or has several labels.
    """

    def __init__(self, spec: ModelSpec, *args: Any, **kwargs: Any) -> None:
        if spec.value_head is None or spec.value_head.num_labels != 1:
            got = f"{spec.value_head.num_labels} labels" if spec.value_head else "no value head"
            raise EngineError(
                f"{spec.family}: got {got}, expected a value head with 1 label; read the spec of a critic"
            )
        self._head: ValueHead = spec.value_head
        super().__init__(spec, *args, **kwargs)

    def load_checkpoint(self, folder: Path) -> None:
        """Read this rank's slices of an HF checkpoint; without a value head there, the new one stays.

        Raises:
            LayoutError: When files are damaged or do not fit the model.
        """
        if self._head.weight in read_checkpoint_index(folder):
            super().load_checkpoint(folder)
            return
        if self._groups.rank == 0:
            _log.warning("%s has no %s: the value head starts from random weights", folder, self._head.weight)
        shard_map = _without(self._shard_map, {self._head.weight, self._head.bias})
        load_checkpoint(folder, backbone(self.layout.spec), shard_map, self.tensors())
        self.parameters_changed()

    def values(self, batch: SequenceBatch) -> NDArray[np.float32] | None:
        """Return the value after every token, [num_samples, max_tokens], 0 beyond a row's length. Collective over the role."""
        picked = np.arange(batch.token_ids.shape[1]) < batch.lengths[:, None]
        batches = self._split(batch, picked, {}, lead=0)
        _, results = self._forward(batch, batches, 1.0)
        if not self._groups.is_last_stage:
            return None
        values = scatter_back(picked, batches, [result.logprobs for result in results], self._groups)
        return values if self._groups.is_reporting else None

    def rewards(self, batch: SequenceBatch) -> NDArray[np.float32] | None:
        """Return the value after the last token of each row, [num_samples]. Collective over the role."""
        values = self.values(batch)
        return None if values is None else values[np.arange(batch.num_samples), batch.lengths - 1]

    def update_values(self, batch: ValueBatch, clip_value: float | None = None) -> ValueMetrics | None:
        """Take one optimizer step on the clipped value loss. Collective over the role.

        The loss is the sum, over the rows of all data-parallel ranks, of loss_weights times the token loss.

        Args:
            clip_value: How far a value may move from old_values with a gradient; None does not clip.

        Raises:
            EngineError: When the model is frozen, or loss_weights are set outside loss_mask.
        """
        values = {"old_values": batch.old_values, "returns": batch.returns, "loss_weights": batch.loss_weights}
        batches = self._split(batch.sequences, batch.loss_mask, values, lead=0)
        results, step, _, _ = self._step(batch.sequences, batches, 1.0, value_objective(clip_value))
        if not self._groups.is_last_stage:
            return None
        sums = self._total(results)
        return _metrics(sums, step) if self._groups.is_reporting else None


class ValueSum(enum.IntEnum):
    """Rows of the vector of sums of :func:`value_objective`."""

    LOSS = 0
    TOKENS = 1
    VALUE = 2
    RETURN = 3
    SQUARED_RETURN = 4
    SQUARED_ERROR = 5
    CLIPPED = 6


def value_objective(clip_value: float | None) -> LossFunction:
    """Return the weighted sum of the clipped value loss."""
    return partial(_value_objective, clip_value)


def _value_objective(
    clip_value: float | None, values: torch.Tensor, _entropies: torch.Tensor, inputs: Values
) -> tuple[torch.Tensor, torch.Tensor]:
    old, returns = inputs["old_values"], inputs["returns"]
    loss = (inputs["loss_weights"] * value_loss(values, old, returns, clip_value)).sum()
    now = values.detach()
    rows = {
        ValueSum.LOSS: loss.detach(),
        ValueSum.TOKENS: torch.tensor(now.numel()),
        ValueSum.VALUE: now.sum(),
        ValueSum.RETURN: returns.sum(),
        ValueSum.SQUARED_RETURN: returns.square().sum(),
        ValueSum.SQUARED_ERROR: (now - returns).square().sum(),
        ValueSum.CLIPPED: ((now - old).abs() > (torch.inf if clip_value is None else clip_value)).sum(),
    }
    return loss, torch.stack([rows[name].to(now.device, torch.float64) for name in ValueSum])


def _metrics(sums: list[float], step: StepResult) -> ValueMetrics:
    num_tokens = max(1.0, sums[ValueSum.TOKENS])
    mean_return = sums[ValueSum.RETURN] / num_tokens
    variance = sums[ValueSum.SQUARED_RETURN] / num_tokens - mean_return**2
    error = sums[ValueSum.SQUARED_ERROR] / num_tokens
    return ValueMetrics(
        loss=sums[ValueSum.LOSS],
        grad_norm=step.grad_norm,
        lr=step.lr,
        value_mean=sums[ValueSum.VALUE] / num_tokens,
        return_mean=mean_return,
        explained_variance=1.0 - error / variance if variance > 0 else 0.0,
        clip_fraction=sums[ValueSum.CLIPPED] / num_tokens,
        num_tokens=int(sums[ValueSum.TOKENS]),
        is_skipped=step.is_skipped,
        num_skipped=step.num_skipped,
    )


def _without(shard_map: ShardMap, canonical: set[str | None]) -> ShardMap:
    """Return the map without some canonical tensors, each of which has local tensors of its own."""
    shards = tuple(shard for shard in shard_map.shards if shard.tensor not in canonical)
    kept = {shard.local for shard in shards}
    return replace(
        shard_map,
        tensors={name: tensor for name, tensor in shard_map.tensors.items() if name in kept},
        shards=shards,
        canonical={name: tensor for name, tensor in shard_map.canonical.items() if name not in canonical},
    )
