"""Where the tokens of packed sequences lie on the ranks of a context-parallel group, and how attention finds them.

Sequences lie one behind the other (THD). With cp ranks each sequence is cut into 2 * cp chunks, and rank r holds chunks r
and 2 * cp - 1 - r, so that every rank has as much causal attention to compute. This is the order that Megatron-core and
Transformer Engine expect of packed sequences.

Worked example: lengths 4 and 8 with cp 2. Chunks have 1 and 2 tokens; rank 0 holds tokens 0, 3 of the first sequence and
0, 1, 6, 7 of the second; rank 1 holds 1, 2 and 2, 3, 4, 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray

Index = NDArray[np.int64]

# Sequences of one attention call may be this much shorter than the longest; shorter ones form a call of their own.
_MIN_LENGTH_RATIO = 0.75


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length that attend in one call, right-padded to the longest.

    A padded place repeats some other token: as a key no real query sees it, and as a query its result is dropped.

    Attributes:
        num_sequences: Rows of the call.
        queries: [num_sequences * query_width] int64 into the tokens of this rank.
        keys: [num_sequences * key_width] int64 into the tokens of all cp ranks, rank after rank.
        mask: [num_sequences, 1, query_width, key_width] bool, True where a query sees a key; None for the plain causal
            mask, when every token is on this rank.
    """

    num_sequences: int
    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, and what our own attention derives from it.

    Attributes:
        lengths: Tokens of each sequence with its padding, over all cp ranks; multiples of 2 * cp when cp > 1.
    """

    lengths: tuple[int, ...] = ()
    cp_size: int = 1
    cp_rank: int = 0

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The attention calls."""
        starts = np.cumsum([0, *self.lengths]) // self.cp_size
        return tuple(self._bucket(members, starts) for members in _similar(self.lengths))

    @cached_property
    def results(self) -> torch.Tensor:
        """[tokens of this rank] int64; place of each token in the queries of all buckets, one behind the other."""
        queries = torch.cat([bucket.queries for bucket in self.buckets])
        # Padded places repeat a token that comes before them, so that the first place of each token is its own.
        places = torch.arange(len(queries) - 1, -1, -1, device=queries.device)
        out = torch.empty(sum(self.lengths) // self.cp_size, dtype=torch.int64, device=queries.device)
        return out.scatter_reduce_(0, queries.flip(0), places, "amin", include_self=False)

    def _bucket(self, members: list[int], starts: Index) -> Bucket:
        lengths, firsts = [self.lengths[member] for member in members], [int(starts[member]) for member in members]
        mine = [positions_of_rank(length, self.cp_size, self.cp_rank) for length in lengths]
        queries = self._tensor(_stack([first + np.arange(len(held)) for first, held in zip(firsts, mine, strict=True)]))
        if self.cp_size == 1:
            return Bucket(len(members), queries.view(-1), queries.view(-1), None)
        keys = _stack(
            [self._gathered(length, first, starts[-1]) for length, first in zip(lengths, firsts, strict=True)]
        )
        sees = np.arange(keys.shape[1]) <= _stack(mine)[:, :, None]
        return Bucket(len(members), queries.view(-1), self._tensor(keys).view(-1), self._tensor(sees[:, None]))

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.cu_seqlens_q.device)

    def _gathered(self, length: int, first: int, tokens_per_rank: int) -> Index:
        """Return where the tokens of a sequence lie when the tokens of all ranks are put one behind the other."""
        out = np.empty(length, dtype=np.int64)
        for rank in range(self.cp_size):
            held = positions_of_rank(length, self.cp_size, rank)
            out[held] = rank * tokens_per_rank + first + np.arange(len(held))
        return out


def packed_sequences(lengths: Sequence[int], cp_size: int, cp_rank: int, device: torch.device) -> PackedSequences:
    """Describe sequences of the given padded lengths; padding is attended to like tokens, which no token before it notices."""
    starts = torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device)
    longest = max(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
        cp_size=cp_size,
        cp_rank=cp_rank,
    )


def positions_of_rank(length: int, cp_size: int, cp_rank: int) -> Index:
    """Return the positions within a sequence that a rank holds."""
    if cp_size == 1:
        return np.arange(length)
    chunk = length // (2 * cp_size)
    assert chunk * 2 * cp_size == length, (length, cp_size)
    last = 2 * cp_size - 1 - cp_rank
    return np.concatenate(
        [np.arange(cp_rank * chunk, (cp_rank + 1) * chunk), np.arange(last * chunk, (last + 1) * chunk)]
    )


def _similar(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of sequences of similar length, longest first."""
    order = sorted(range(len(lengths)), key=lambda member: -lengths[member])
    group: list[int] = []
    for member in order:
        if group and lengths[member] < _MIN_LENGTH_RATIO * lengths[group[0]]:
            yield group
            group = []
        group.append(member)
    yield group


def _stack(rows: Sequence[Index]) -> Index:
    """Stack ragged rows; what is missing repeats the row's first entry."""
    width = max(map(len, rows))
    out = np.empty((len(rows), width), dtype=np.int64)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
        row[len(values) :] = values[0]
    return out
