"""A role's processes: N Ray actors that are called together and fail together."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from hybridrl.observability.hang_verdict import PendingCall
from hybridrl.observability.heartbeat import HEARTBEAT
from hybridrl.roles.dispatch import Dispatch
from hybridrl.roles.failure import Failure, FailureKind, kind_of

_LOST_PROCESS = (
    RayActorError,
    WorkerCrashedError,
    OutOfMemoryError,  # Ray's own: it ended the process to save the node
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,  # an answer or an argument that was on a node or with a process that is gone
)

T = TypeVar("T")
Observe = Callable[[str, str, str, float, float], None]
"""Takes role, rank, phase, and when a call was made and answered, by time.perf_counter()."""


def unobserved(role: str, rank: str, phase: str, start_s: float, end_s: float) -> None:
    """Let an answer pass."""


class Calls:
    """The calls that the groups of one run have made.

    Args:
        observe: Told of every answer.
    """

    def __init__(self, observe: Observe = unobserved) -> None:
        self.observe = observe
        self._futures: weakref.WeakSet[RoleFuture[Any]] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, future: RoleFuture[Any]) -> None:
        """Know of a call, for as long as somebody may ask for its answer."""
        with self._lock:
            self._futures.add(future)

    def pending(self) -> list[PendingCall]:
        """Return what is not answered."""
        with self._lock:
            futures = list(self._futures)
        return [call for future in futures for call in future.pending()]


class RoleGroup:
    """The ranks of one role.

    Args:
        role: Named in errors.
        actors: One handle per rank.
        dp_ranks: Data-parallel rank of each rank.
        ranks: What errors call each rank; None numbers them from 0.
        calls: Of the run; None for a group by itself.
        is_replaceable: Whether a rank that died can be started again by itself.
    """

    def __init__(
        self,
        role: str,
        actors: Sequence[ActorHandle[Any]],
        dp_ranks: Sequence[int],
        ranks: Sequence[int] | None = None,
        calls: Calls | None = None,
        *,
        is_replaceable: bool = False,
    ) -> None:
        assert len(actors) == len(dp_ranks), (len(actors), len(dp_ranks))
        self.role = role
        self.dp_ranks = tuple(dp_ranks)
        self.ranks = tuple(range(len(actors)) if ranks is None else ranks)
        self.calls = calls or Calls()
        self.is_replaceable = is_replaceable
        self._actors = list(actors)

    def call(
        self, method: str, dispatch: Dispatch, combine: Callable[[list[Any]], T], *, phase: str, timeout_s: float
    ) -> RoleFuture[T]:
        """Call a method on every rank and return at once.

        Args:
            combine: Makes one value of the ranks' answers, given in rank order.
            phase: Named in errors.
            timeout_s: Bound on the whole call.
        """
        stored = [tuple(ray.put(argument) for argument in arguments) for arguments in dispatch.arguments]
        refs = [
            getattr(actor, method).remote(*stored[slot])
            for actor, slot in zip(self._actors, dispatch.slots(self.dp_ranks), strict=True)
        ]
        return RoleFuture(self, phase, refs, combine, timeout_s)

    def kill(self) -> None:
        """End all processes of the role, now."""
        for actor in self._actors:
            ray.kill(actor)


class RoleFuture(Generic[T]):
    """See :class:`hybridrl.roles.future.Future`; made by :meth:`RoleGroup.call`."""

    def __init__(
        self, group: RoleGroup, phase: str, refs: Sequence[Any], combine: Callable[[list[Any]], T], timeout_s: float
    ) -> None:
        self._group = group
        self._phase = phase
        self._combine = combine
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._called_at = time.perf_counter()
        self._ranks = {ref: rank for rank, ref in enumerate(refs)}
        self._pending = list(refs)
        self._answers: dict[int, Any] = {}
        self._failures: list[Failure] = []
        group.calls.add(self)

    def poll(self, wait_s: float) -> bool:
        """Take in answers until all are there, one more failed, or `wait_s` has passed; return whether none is pending."""
        until = min(time.monotonic() + wait_s, self._deadline)
        num_failures = len(self._failures)
        while self._pending and len(self._failures) == num_failures:
            wait = max(0.0, until - time.monotonic())
            ready, self._pending = ray.wait(self._pending, num_returns=1, timeout=wait)
            if not ready:
                break
            self._take(ready[0])
        if self._pending and time.monotonic() >= self._deadline:
            self._time_out()
        return not self._pending

    def failures(self) -> Sequence[Failure]:
        """Return the failures seen so far."""
        return self._failures

    def pending(self) -> list[PendingCall]:
        """Return the ranks that have neither answered nor failed."""
        ranks = [self._group.ranks[self._ranks[ref]] for ref in list(self._pending)]
        return [PendingCall(self._group.role, rank, self._phase) for rank in ranks]

    def value(self) -> T:
        """Combine the answers of all ranks."""
        assert not self._pending and not self._failures, (self._phase, self._failures)
        return self._combine([self._answers[rank] for rank in range(len(self._ranks))])

    def abandon(self) -> None:
        """End the role's processes."""
        self._group.kill()

    def _take(self, ref: Any) -> None:
        HEARTBEAT.advance()
        rank, group = self._ranks[ref], self._group
        answered_at = time.perf_counter()
        group.calls.observe(group.role, f"rank {group.ranks[rank]}", self._phase, self._called_at, answered_at)
        try:
            self._answers[rank] = ray.get(ref)
        except RayError as e:
            self._fail(rank, *failure_of(e))

    def _time_out(self) -> None:
        for ref in self._pending:
            self._fail(self._ranks[ref], FailureKind.TIMED_OUT, f"gave up after {self._timeout_s:g} s")
        self._pending = []

    def _fail(self, rank: int, kind: FailureKind, text: str) -> None:
        group, can_restart = self._group, self._group.is_replaceable and kind is FailureKind.DIED
        self._failures.append(Failure(group.role, group.ranks[rank], self._phase, kind, text, can_restart))


def failure_of(error: RayError) -> tuple[FailureKind, str]:
    """Tell what an error in place of a rank's answer says about the rank, and in which words."""
    if isinstance(error, RayTaskError):
        kind = FailureKind.CONNECTION if isinstance(error.cause, _LOST_PROCESS) else kind_of(error.cause)
        return kind, str(error.cause if kind is FailureKind.DIED else error)  # str(error) is the remote traceback
    if isinstance(error, _LOST_PROCESS):
        return FailureKind.DIED, f"its process ended (killed, or out of memory?): {type(error).__name__}: {error}"
    return FailureKind.RAISED, f"{type(error).__name__}: {error}"
