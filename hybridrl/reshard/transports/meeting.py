"""How the ranks of a plan come together in a store, and find out which of them are missing, within one bound of time.

The first rank holds the store and leads: it waits for all, and tells all who stayed away and how much time is left. With nobody
missing each rank connects, says when that has ended, well or not, and waits until all have said so; one that was killed never does.
When somebody is missing the first rank leaves last, since the store ends with it.

Example of 100 s: all come within 5 s, so 95 s are left. Connecting may take 71 s of them, and 14 s later who is silent is missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

_MEET_SHARE = 0.85  # of the bound
_JOIN_SHARE, _REPORT_SHARE = 0.75, 0.9  # of what is left after the meeting


class Meeting:
    """One rank's part in it; methods are called in their order, with the store's RuntimeError when the first rank is gone.

    Args:
        deadline: Of everything, by time.monotonic().
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, deadline: float) -> None:
        self._store = store
        self._rank = rank
        self._ranks = range(num_ranks)
        self._deadline = deadline
        self._met_at, self._left_s = time.monotonic(), 0.0

    def meet(self) -> list[int]:
        """Wait for all ranks; return those that did not come."""
        absent = self._agreed("here", _MEET_SHARE * self._until(self._deadline))
        self._met_at = time.monotonic()
        if absent:
            self._say("left")
        return absent

    def time_to_join(self) -> timedelta:
        """Return how long connecting may take."""
        return timedelta(seconds=self._until(self._met_at + _JOIN_SHARE * self._left_s))

    def missing(self) -> list[int]:
        """Say that this rank has ended to connect, and wait for the others; return those that do not say so."""
        silent = self._agreed("ended", self._until(self._met_at + _REPORT_SHARE * self._left_s))
        self._say("left")
        return silent

    def see_off(self, missing: Iterable[int]) -> None:
        """Have the first rank wait until the others have left, but for the missing."""
        if self._rank == 0:
            self._silent("left", set(self._ranks).difference(missing), self._until(self._deadline))

    def _agreed(self, what: str, within_s: float) -> list[int]:
        """Say something, and return who did not say it within the first rank's time, which asks for all."""
        self._say(what)
        if self._rank == 0:
            silent = self._silent(what, self._ranks, within_s)
            self._store.set(f"not-{what}", json.dumps([silent, self._until(self._deadline)]))
        else:
            self._store.wait([f"not-{what}"], timedelta(seconds=self._until(self._deadline)))
        silent, self._left_s = json.loads(self._store.get(f"not-{what}"))
        return [int(rank) for rank in silent]

    def _say(self, what: str) -> None:
        self._store.set(f"{what}-{self._rank}", "")

    def _silent(self, what: str, ranks: Iterable[int], within_s: float) -> list[int]:
        keys = {rank: f"{what}-{rank}" for rank in ranks}
        with suppress(dist.DistStoreError):
            self._store.wait([*keys.values()], timedelta(seconds=within_s))
            return []
        return [rank for rank, key in keys.items() if not self._store.check([key])]

    def _until(self, moment: float) -> float:
        return max(0.001, min(moment, self._deadline) - time.monotonic())
