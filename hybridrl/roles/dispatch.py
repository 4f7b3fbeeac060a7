"""Dispatch: which rank gets which arguments, and how the answers of the ranks become one.

    BROADCAST    every rank gets the same arguments
    PER_RANK     rank r gets arguments[r]
    SCATTER_DP   data-parallel rank d's arguments go to all its model-parallel ranks

Rows of a batch are dealt out by what they cost to train on, so that no data-parallel rank waits for another. Example: rows
of cost 9, 4, 3 and 2 on dp 2 are row 0 and rows 1, 2, 3.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridrl.data.batch import Element
from hybridrl.data.partition import balanced_parts


class DispatchKind(enum.Enum):
    """How arguments are spread over the ranks."""

    BROADCAST = "broadcast"
    PER_RANK = "per_rank"
    SCATTER_DP = "scatter_dp"


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Arguments of one call; make one with :func:`broadcast`, :func:`per_rank` or :func:`scatter_dp`.

    Attributes:
        arguments: One tuple of arguments for all ranks, per rank, or per data-parallel rank.
    """

    kind: DispatchKind
    arguments: tuple[tuple[Any, ...], ...]

    def slots(self, dp_ranks: Sequence[int]) -> list[int]:
        """Return, per rank, the index into `arguments` that it gets.

        Args:
            dp_ranks: Data-parallel rank of each rank.
        """
        slots = {
            DispatchKind.BROADCAST: [0] * len(dp_ranks),
            DispatchKind.PER_RANK: list(range(len(dp_ranks))),
            DispatchKind.SCATTER_DP: list(dp_ranks),
        }[self.kind]
        assert set(slots) == set(range(len(self.arguments))), (self.kind, len(self.arguments), list(dp_ranks))
        return slots


def broadcast(*arguments: Any) -> Dispatch:
    """Give every rank the same arguments."""
    return Dispatch(DispatchKind.BROADCAST, (arguments,))


def per_rank(arguments: Sequence[tuple[Any, ...]]) -> Dispatch:
    """Give each rank its own arguments."""
    return Dispatch(DispatchKind.PER_RANK, tuple(arguments))


def scatter_dp(arguments: Sequence[tuple[Any, ...]]) -> Dispatch:
    """Give each data-parallel rank its own arguments."""
    return Dispatch(DispatchKind.SCATTER_DP, tuple(arguments))


def rows_of_dp_ranks(costs: NDArray[np.float64], dp_size: int) -> list[NDArray[np.int64]]:
    """Return the rows of each data-parallel rank, of nearly equal cost.

    Args:
        costs: [num_rows] of each row.
    """
    return balanced_parts(costs, dp_size)


def from_reporting_ranks(values: Sequence[Any], dp_ranks: Sequence[int]) -> list[Any]:
    """Return the one answer of each data-parallel rank; all its other ranks answered None."""
    reported = [(dp_rank, value) for dp_rank, value in zip(dp_ranks, values, strict=True) if value is not None]
    assert sorted(dp_rank for dp_rank, _ in reported) == sorted(set(dp_ranks)), (reported, list(dp_ranks))
    return [value for _, value in sorted(reported, key=lambda entry: entry[0])]


def join_rows(parts: Sequence[NDArray[Element]], rows: Sequence[NDArray[np.int64]]) -> NDArray[Element]:
    """Put the rows of the data-parallel ranks back in batch order."""
    out: NDArray[Element] = np.zeros((sum(map(len, rows)), *parts[0].shape[1:]), dtype=parts[0].dtype)
    for part, index in zip(parts, rows, strict=True):
        out[index] = part
    return out
