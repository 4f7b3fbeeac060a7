"""Cuts one rank's rows into micro-batches of packed sequences: the one place that decides order, alignment and which tokens count.

Sequences lie one behind the other, without padding but for alignment: with context parallelism each is a multiple of 2 * cp
tokens, with sequence parallelism all of them together a multiple of tp per rank. Micro-batches are filled up to a budget of
tokens and made equally dear. Expert exchanges are collective over data-parallel ranks, so the ranks agree on the number of
micro-batches and run them in the same order, from cheap over dear to cheap: the pipeline fills and drains with the cheap
ones. A rank that runs out of rows runs a micro-batch of padding, which carries no weight.

Worked example: tp 2 with sequence parallelism, rows of 5, 4, 3 and 3 tokens, a budget of 8. Two micro-batches: 5 + 3 = 8
tokens and 4 + 3 = 7, the second aligned to 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hybridrl.data.batch import SequenceBatch
from hybridrl.data.partition import balanced_parts
from hybridrl.engines.megatron.packing import PackedSequences, packed_sequences, positions_of_rank
from hybridrl.engines.megatron.process_groups import ProcessGroups
from hybridrl.errors import EngineError
from hybridrl.layout.cost import SequenceCost

Index = NDArray[np.int64]
T = TypeVar("T", int, Index)


@dataclass(frozen=True, slots=True)
class PackingRules:
    """How rows become micro-batches.

    Attributes:
        max_tokens: Tokens of a micro-batch, over the context-parallel ranks together, at most.
        is_packed: Otherwise every row is padded to the longest, as a yardstick.
        sequence_multiple: Each sequence is padded to a multiple of this.
        total_multiple: The tokens of a micro-batch are padded to a multiple of this; a multiple of `sequence_multiple`.
        count_multiple: The number of micro-batches is a multiple of this.
    """

    max_tokens: int
    is_packed: bool
    sequence_multiple: int
    total_multiple: int
    count_multiple: int

    def widths(self, lengths: NDArray[np.int32]) -> Index:
        """Return the tokens that each row takes up, before the end of the micro-batch is aligned."""
        used = lengths.astype(np.int64)
        if not self.is_packed:
            used[:] = used.max(initial=0)
        return _round_up(np.maximum(used, 1), self.sequence_multiple)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One rank's part of the packed tokens of one forward pass, and the tokens whose log-prob or value is wanted.

    Attributes:
        token_ids: [1, tokens] int64.
        position_ids: [1, tokens] int64; restart with each sequence.
        packed: Where sequences begin and end.
        places: [tokens] int64; where each token stands in the flattened [num_samples, max_tokens] batch, -1 for alignment.
        predicting: [num_picked] int64; the position before each picked token, or of the token itself for values.
        targets: [num_picked] int64; the picked tokens.
        picks: [num_picked] int64; which of the call's picked tokens they are, counted in row order.
        values: Further [num_picked] float32 values of the picked tokens, by name.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    packed: PackedSequences
    places: torch.Tensor
    predicting: torch.Tensor
    targets: torch.Tensor
    picks: torch.Tensor
    values: Mapping[str, torch.Tensor]


def split(
    batch: SequenceBatch,
    picked: NDArray[np.bool_],
    values: Mapping[str, NDArray[np.float32]],
    groups: ProcessGroups,
    rules: PackingRules,
    cost: SequenceCost,
    lead: int = 1,
) -> list[MicroBatch]:
    """Cut `batch` into micro-batches. Collective over all ranks.

    Args:
        picked: [num_samples, max_tokens] bool; tokens whose log-prob is wanted.
        values: [num_samples, max_tokens] arrays that the loss needs at the picked tokens.
        lead: How many tokens before each picked one the model's output for it stands: 1 for log-probs, 0 for values.

    Raises:
        EngineError: When a picked token is the first of its row or lies beyond its end, or a row is longer than a
            micro-batch may be.
    """
    _check_picked(batch, picked, lead)
    widths = rules.widths(batch.lengths)
    if widths.max(initial=0) > rules.max_tokens:
        row = int(widths.argmax())
        raise EngineError(
            f"row {row} has {batch.lengths[row]} tokens and takes up {widths[row]}, but micro_batch_tokens is "
            f"{rules.max_tokens}; raise it or shorten the row"
        )
    costs = cost(widths.astype(np.int32))
    parts = _fewest_parts(widths, costs, rules)
    num_parts = _agree(len(parts), groups)
    if num_parts > len(parts):
        finer = balanced_parts(costs, num_parts)
        empty = [np.zeros(0, dtype=np.int64)] * (num_parts - len(parts))
        parts = finer if _fit(finer, widths, rules) else [*parts, *empty]
    packer = _Packer(batch, picked, values, widths, groups, rules.total_multiple, lead)
    return [packer.pack(part) for part in _hill(parts, costs)]


def _check_picked(batch: SequenceBatch, picked: NDArray[np.bool_], lead: int) -> None:
    beyond = np.arange(picked.shape[1]) >= batch.lengths[:, None]
    for wrong, why in (
        (picked[:, :lead], "is the first of its row, which nothing predicts"),
        (picked & beyond, "lies beyond its row's length"),
    ):
        if wrong.any():
            row, token = np.argwhere(wrong)[0]
            raise EngineError(
                f"loss_mask selects token {token} of row {row} (length {batch.lengths[row]}), which {why}"
            )


def _fewest_parts(widths: Index, costs: NDArray[np.float64], rules: PackingRules) -> list[Index]:
    """Return few equally dear parts that fit the budget.

    No number of parts below the first one tried can fit: neither in tokens, nor because rows of more than half a budget need a part
    each. Where equally dear parts exceed the budget, as many parts as first-fit decreasing needs are tried, and then its own taken.
    """
    num_wide = int((2 * widths > rules.max_tokens).sum())
    fewest = max(1, -(-int(widths.sum()) // rules.max_tokens), num_wide)
    if _fit(parts := balanced_parts(costs, _round_up(fewest, rules.count_multiple)), widths, rules):
        return parts
    fitted = _first_fit_decreasing(widths, rules.max_tokens)
    num_parts = _round_up(len(fitted), rules.count_multiple)
    if _fit(parts := balanced_parts(costs, num_parts), widths, rules):
        return parts
    return [*fitted, *[np.zeros(0, dtype=np.int64)] * (num_parts - len(fitted))]


def _first_fit_decreasing(widths: Index, max_tokens: int) -> list[Index]:
    """Return parts within the budget: the widest row first, each in the first part with room."""
    rooms: Index = np.zeros(0, dtype=np.int64)
    parts: list[list[int]] = []
    for row in np.argsort(-widths, kind="stable").tolist():
        found = np.flatnonzero(rooms >= widths[row])
        if not found.size:
            rooms = np.append(rooms, max_tokens)
            parts.append([])
            found = np.array([len(parts) - 1])
        rooms[found[0]] -= widths[row]
        parts[int(found[0])].append(row)
    return [np.array(sorted(part), dtype=np.int64) for part in parts]


def _fit(parts: Sequence[Index], widths: Index, rules: PackingRules) -> bool:
    return all(widths[part].sum() <= rules.max_tokens for part in parts)


def _agree(num_parts: int, groups: ProcessGroups) -> int:
    agreed = torch.tensor(num_parts, device=groups.device)
    if groups.sizes.dp > 1:
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=groups.collection.dp)
    return int(agreed)


def _hill(parts: Sequence[Index], costs: NDArray[np.float64]) -> list[Index]:
    """Order parts from cheap over dear to cheap, e.g. costs 1, 3, 4, 2."""
    rising = sorted(parts, key=lambda part: float(costs[part].sum()))
    return [*rising[::2], *rising[1::2][::-1]]


def _round_up(value: T, multiple: int) -> T:
    return -(-value // multiple) * multiple


class _Packer:
    """Lays out rows and picks this rank's tokens of them."""

    def __init__(
        self,
        batch: SequenceBatch,
        picked: NDArray[np.bool_],
        values: Mapping[str, NDArray[np.float32]],
        widths: Index,
        groups: ProcessGroups,
        total_multiple: int,
        lead: int,
    ) -> None:
        self._batch, self._widths, self._total_multiple = batch, widths, total_multiple
        self._groups = groups
        rows, tokens = np.nonzero(picked)
        self._targets = batch.token_ids[rows, tokens].astype(np.int64)
        self._values = {name: np.asarray(value[rows, tokens], dtype=np.float32) for name, value in values.items()}
        self._pick_at = np.full(batch.token_ids.shape, -1, dtype=np.int64)
        self._pick_at[rows, tokens - lead] = np.arange(len(rows))

    def pack(self, part: Index) -> MicroBatch:
        cp_size, cp_rank = self._groups.sizes.cp, self._groups.at.cp
        widths = self._aligned(part)
        token_ids, positions, picks, places = (np.zeros(sum(widths) // cp_size, dtype=np.int64) for _ in range(4))
        picks[:] = places[:] = -1
        start = 0
        for row, width in zip([*part, *[None] * (len(widths) - len(part))], widths, strict=True):
            held = positions_of_rank(width, cp_size, cp_rank)
            here = slice(start, start + len(held))
            positions[here] = held
            if row is not None:
                real = held < self._batch.lengths[row]
                token_ids[here][real] = self._batch.token_ids[row, held[real]]
                picks[here][real] = self._pick_at[row, held[real]]
                places[here][real] = row * self._batch.token_ids.shape[1] + held[real]
            start += len(held)
        predicting = np.nonzero(picks >= 0)[0]
        picks = picks[predicting]
        return MicroBatch(
            token_ids=self._tensor(token_ids[None]),
            position_ids=self._tensor(positions[None]),
            packed=packed_sequences(widths, cp_size, cp_rank, self._groups.device),
            places=self._tensor(places),
            predicting=self._tensor(predicting),
            targets=self._tensor(self._targets[picks]),
            picks=self._tensor(picks),
            values={name: self._tensor(value[picks]) for name, value in self._values.items()},
        )

    def _aligned(self, part: Index) -> list[int]:
        """Return the tokens of each sequence; what the whole lacks is added to the last, or is one of its own."""
        widths = [int(width) for width in self._widths[part]]
        total = max(sum(widths), 1)
        missing = _round_up(total, self._total_multiple) - sum(widths)
        if widths:
            return [*widths[:-1], widths[-1] + missing]
        return [missing]

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._groups.device)


def scatter_back(
    picked: NDArray[np.bool_], batches: Sequence[MicroBatch], pieces: Sequence[torch.Tensor], groups: ProcessGroups
) -> NDArray[np.float32]:
    """Put the values of picked tokens back into [num_samples, max_tokens]; others are 0. Collective over the cp ranks."""
    flat = torch.zeros(int(picked.sum()), device=groups.device)
    for batch, piece in zip(batches, pieces, strict=True):
        flat[batch.picks] = piece.float()
    if groups.sizes.cp > 1:
        dist.all_reduce(flat, group=groups.collection.cp)
    out = np.zeros(picked.shape, dtype=np.float32)
    out[picked] = flat.cpu().numpy()
    return out
