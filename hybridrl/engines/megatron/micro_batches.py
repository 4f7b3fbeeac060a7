"""Cuts one rank's rows into micro-batches: the one place that decides widths, padding and which tokens count.

Every rank must run the same number of micro-batches of the same shape, because pipeline messages have fixed shapes and
expert exchanges are collective. So the ranks first agree on the longest row and on the largest number of rows; a rank
with fewer rows fills up with empty ones, which carry no weight.

Worked example: tp 2 with sequence parallelism, 5 rows on one rank and 3 on the other, longest row 9, at most 2 rows a
micro-batch. Width 10 (a multiple of tp), 3 micro-batches of 2 rows on both ranks, 1 and 3 empty rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hybridrl.data.batch import SequenceBatch
from hybridrl.engines.megatron.process_groups import ProcessGroups
from hybridrl.errors import EngineError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass, right-padded, and the tokens whose log-prob is wanted.

    Attributes:
        token_ids: [rows, width] int64.
        position_ids: [rows, width] int64.
        predicting: [num_picked] int64; flat index, in [rows * width], of the position before each picked token.
        targets: [num_picked] int64; the picked tokens.
        values: Further [num_picked] float32 values of the picked tokens, by name.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    predicting: torch.Tensor
    targets: torch.Tensor
    values: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """All micro-batches of one call.

    Attributes:
        picked: [num_samples, max_tokens] bool, of the given arrays; the tokens whose log-prob is computed, in row order.
    """

    batches: tuple[MicroBatch, ...]
    rows: int
    width: int
    picked: NDArray[np.bool_]


def split(
    batch: SequenceBatch,
    picked: NDArray[np.bool_],
    values: Mapping[str, NDArray[np.float32]],
    groups: ProcessGroups,
    max_rows: int,
    width_multiple: int,
) -> MicroBatches:
    """Cut `batch` into micro-batches of at most `max_rows` rows. Collective over all ranks.

    Args:
        picked: [num_samples, max_tokens] bool; tokens whose log-prob is wanted.
        values: [num_samples, max_tokens] arrays that the loss needs at the picked tokens.
        width_multiple: Rows are padded to a multiple of this.

    Raises:
        EngineError: When a picked token is the first of its row or lies beyond its end.
    """
    _check_picked(batch, picked)
    longest, num_rows = _agree(int(batch.lengths.max(initial=0)), batch.num_samples, groups)
    width = max(1, -(-longest // width_multiple)) * width_multiple
    num_batches = max(1, -(-num_rows // max_rows))
    rows = max(1, -(-num_rows // num_batches))
    batches = tuple(
        _micro_batch(batch, picked, values, slice(i * rows, (i + 1) * rows), (rows, width), groups.device)
        for i in range(num_batches)
    )
    return MicroBatches(batches, rows, width, picked)


def _check_picked(batch: SequenceBatch, picked: NDArray[np.bool_]) -> None:
    beyond = np.arange(picked.shape[1]) >= batch.lengths[:, None]
    for wrong, why in (
        (picked[:, :1], "is the first of its row, which nothing predicts"),
        (picked & beyond, "lies beyond its row's length"),
    ):
        if wrong.any():
            row, token = np.argwhere(wrong)[0]
            raise EngineError(
                f"loss_mask selects token {token} of row {row} (length {batch.lengths[row]}), which {why}"
            )


def _agree(longest: int, num_rows: int, groups: ProcessGroups) -> tuple[int, int]:
    agreed = torch.tensor([longest, num_rows], device=groups.device)
    if groups.sizes.world_size > 1:
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    longest, num_rows = agreed.tolist()
    return longest, num_rows


def _micro_batch(
    batch: SequenceBatch,
    picked: NDArray[np.bool_],
    values: Mapping[str, NDArray[np.float32]],
    rows: slice,
    shape: tuple[int, int],
    device: torch.device,
) -> MicroBatch:
    width = shape[1]
    token_ids = np.zeros(shape, dtype=np.int64)
    source = batch.token_ids[rows, :width]
    token_ids[: source.shape[0], : source.shape[1]] = source
    row, token = np.nonzero(picked[rows, :width])
    arrays = {name: np.ascontiguousarray(value[rows][row, token], dtype=np.float32) for name, value in values.items()}
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        position_ids=torch.arange(width, device=device).expand(shape),
        predicting=torch.from_numpy(row * width + token - 1).to(device),
        targets=torch.from_numpy(token_ids[row, token]).to(device),
        values={name: torch.from_numpy(array).to(device) for name, array in arrays.items()},
    )


def scatter_back(picked: NDArray[np.bool_], pieces: list[torch.Tensor]) -> NDArray[np.float32]:
    """Put the values of picked tokens, micro-batch by micro-batch, back into [num_samples, max_tokens]; others are 0."""
    out = np.zeros(picked.shape, dtype=np.float32)
    out[picked] = torch.cat(pieces).float().cpu().numpy()
    return out
