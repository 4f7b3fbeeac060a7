"""The harness itself: results in rank order, the first failure shown, nothing left running."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from tests.dist.gloo import RankError, run_ranks


def rank_and_world(rank, init_method, *args):
    return rank, args


def fail_on_rank_1(rank, init_method):
    if rank == 1:
        raise ValueError("the reason")
    time.sleep(60)


def sleep_on_rank_1(rank, init_method):
    time.sleep(60 if rank == 1 else 0)


def test_results_come_in_rank_order():
    assert run_ranks(rank_and_world, 3, "a", 2) == [(rank, ("a", 2)) for rank in range(3)]


def test_the_first_failing_rank_is_shown_with_its_traceback():
    with pytest.raises(RankError, match=r"(?s)rank 1 failed first:.*in fail_on_rank_1.*ValueError: the reason"):
        run_ranks(fail_on_rank_1, 2)
    assert not multiprocessing.active_children()


def test_ranks_that_do_not_finish_are_named_and_killed():
    with pytest.raises(RankError, match=r"ranks \[1\] did not finish within 5 s"):
        run_ranks(sleep_on_rank_1, 2, timeout_s=5)
    assert not multiprocessing.active_children()
