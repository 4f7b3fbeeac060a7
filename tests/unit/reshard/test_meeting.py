"""Ranks that meet in a store: who is missing is known to all, also to those that come late, within the bound."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from hybridrl.reshard.transports.meeting import Meeting
from hybridrl.reshard.transports.store import open_store
from hybridrl.roles.ports import free_port

NUM_RANKS, LIMIT_S, SLACK_S = 3, 2.0, 0.5
Seen = tuple[list[int], float]
"""The missing, and the seconds since all began."""


def _together(first: float, second: float, *, is_joining: bool) -> list[Seen]:
    """Have ranks 0 and 1 begin after a delay each; rank 2 does not come, or with `is_joining` never ends its join."""
    port, start = free_port("127.0.0.1"), time.monotonic()
    timeout = timedelta(seconds=LIMIT_S)

    def rank_main(rank: int, delay_s: float) -> Seen:
        time.sleep(delay_s)
        deadline = time.monotonic() + LIMIT_S
        store = open_store("127.0.0.1", port, is_master=rank == 0, timeout=timeout)
        meeting = Meeting(store, rank, NUM_RANKS, deadline)
        missing = meeting.meet()
        if rank < 2:
            missing = missing or meeting.missing()
            meeting.see_off(missing)
        return missing, time.monotonic() - start

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        ranks = [pool.submit(rank_main, rank, delay) for rank, delay in enumerate((first, second))]
        silent = pool.submit(rank_main, 2, 0.0) if is_joining else None
        seen = [rank.result() for rank in ranks]
        assert silent is None or silent.result()[0] == [], "all had come"
        return seen


def test_a_late_rank_learns_from_the_first_who_did_not_come() -> None:
    for missing, seconds in _together(0.0, 1.2, is_joining=False):
        assert missing == [2]
        assert seconds < LIMIT_S + SLACK_S


def test_a_rank_that_never_ends_its_join_is_missing() -> None:
    for missing, seconds in _together(0.0, 0.6, is_joining=True):
        assert missing == [2]
        assert seconds < LIMIT_S + SLACK_S
