"""Arguments reach the right ranks, and answers come back in batch order."""

from __future__ import annotations

import numpy as np
import pytest

from hybridrl.layout.parallel import ParallelSizes
from hybridrl.roles.dispatch import broadcast, from_reporting_ranks, join_rows, per_rank, rows_of_dp_ranks, scatter_dp

SIZES = ParallelSizes(tp=2, pp=2, dp=2)
DP_RANKS = [SIZES.coordinates(rank).dp for rank in range(SIZES.world_size)]


def test_scatter_gives_all_model_parallel_ranks_of_a_dp_rank_the_same_rows() -> None:
    assert DP_RANKS == [0, 0, 1, 1, 0, 0, 1, 1]
    assert scatter_dp([("a",), ("b",)]).slots(DP_RANKS) == DP_RANKS
    assert broadcast("a", 1).slots(DP_RANKS) == [0] * 8
    assert per_rank([(i,) for i in range(8)]).slots(DP_RANKS) == list(range(8))


def test_a_wrong_number_of_arguments_is_caught() -> None:
    with pytest.raises(AssertionError):
        scatter_dp([("a",)]).slots(DP_RANKS)
    with pytest.raises(AssertionError):
        per_rank([("a",)]).slots(DP_RANKS)


@pytest.mark.parametrize(("num_rows", "dp_size"), [(8, 2), (5, 2), (7, 3), (1, 1), (2, 3)])
def test_rows_dealt_out_and_joined_are_the_batch_again(num_rows: int, dp_size: int) -> None:
    batch = np.arange(num_rows * 4, dtype=np.float32).reshape(num_rows, 4)
    rows = rows_of_dp_ranks(np.arange(1.0, num_rows + 1), dp_size)
    np.testing.assert_array_equal(join_rows([batch[part] for part in rows], rows), batch)


def test_one_answer_per_dp_rank_is_taken_in_dp_order() -> None:
    values = [None, None, None, None, "zero", None, "one", None]
    assert from_reporting_ranks(values, DP_RANKS) == ["zero", "one"]


def test_two_reports_of_one_dp_rank_or_none_are_caught() -> None:
    with pytest.raises(AssertionError):
        from_reporting_ranks(["zero", "zero", "one", None, None, None, None, None], DP_RANKS)
    with pytest.raises(AssertionError):
        from_reporting_ranks(["zero"] + [None] * 7, DP_RANKS)
