"""Futures of remote calls, and the one way to wait for them.

    wait_all(a, b)   waits for: every rank of every future        unblocked by: their answers,
                                                                  the first failure anywhere (then at most `grace_s` more),
                                                                  a future's own deadline

No wait is unbounded: a future has its deadline from birth. The death of a replaceable rank cuts no wait short, so that the others are whole
and idle when it is started again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from hybridrl.roles.failure import Failure, ReplaceableRankLostError, lost_ranks, to_error

T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")

GRACE_S = 3.0
_SLICE_S = 0.1


class Future(Protocol[T_co]):
    """The pending answers of one role to one call."""

    def poll(self, wait_s: float) -> bool:
        """Take in answers for at most `wait_s` seconds; return whether all ranks have answered, failed or timed out."""
        ...

    def failures(self) -> Sequence[Failure]:
        """Return the failures seen so far, in the order in which they were seen."""
        ...

    def value(self) -> T_co:
        """Return the combined answer; only when nothing is pending and nothing failed. What died with a replaceable rank is made good first."""
        ...

    def abandon(self) -> None:
        """Give up: end the processes of the role, whose state is unknown after a failure."""
        ...


class Answered(Generic[A]):
    """A call whose answer is known already; see :class:`Future`."""

    def __init__(self, answer: A) -> None:
        self._answer = answer

    def poll(self, wait_s: float) -> bool:
        """Return that it is done."""
        return True

    def failures(self) -> Sequence[Failure]:
        """Return that there are none."""
        return ()

    def value(self) -> A:
        """Return the answer."""
        return self._answer

    def abandon(self) -> None:
        """Do nothing: no process is behind it."""


def wait_for(future: Future[A], beside: Sequence[Future[Any]] = ()) -> A:
    """Wait for one call.

    Args:
        beside: Calls in flight whose answers are not needed yet; a failure of one ends the wait as well.

    Raises:
        EngineError: Naming role, rank and phase of the root cause; the processes of all these roles have been ended.
    """
    wait_all([future], beside=beside)
    return future.value()


def wait_for_both(first: Future[A], second: Future[B]) -> tuple[A, B]:
    """Wait for two calls that depend on each other, such as the two sides of a transfer.

    Raises:
        EngineError: Naming role, rank and phase of the root cause on either side; both roles have been ended.
    """
    wait_all([first, second])
    return first.value(), second.value()


def wait_all(futures: Sequence[Future[Any]], grace_s: float = GRACE_S, beside: Sequence[Future[Any]] = ()) -> None:
    """Wait until every future has its answer.

    Args:
        beside: As in :func:`wait_for`.
        grace_s: Seconds to wait for further failures once one was seen, so that the root cause is among them.

    Raises:
        ReplaceableRankLostError: Replaceable ranks died, and nothing else is wrong.
        EngineError: See :func:`wait_for`.
    """
    give_up_at = float("inf")
    pending = list(futures)
    watched = [*futures, *beside]
    while pending and time.monotonic() < give_up_at:
        pending = [future for future in pending if not future.poll(_SLICE_S)]
        for future in beside:
            future.poll(0.0)
        failures = _failures_of(watched)
        if not failures or lost_ranks(failures):
            give_up_at = float("inf")
        elif give_up_at == float("inf"):
            give_up_at = time.monotonic() + grace_s
    failures = _failures_of(watched)
    if lost := lost_ranks(failures):
        raise ReplaceableRankLostError(str(to_error(failures)), lost)
    if failures:
        for future in watched:
            future.abandon()
        raise to_error(failures)


def _failures_of(futures: Sequence[Future[Any]]) -> list[Failure]:
    return [failure for future in futures for failure in future.failures()]
