"""What goes wrong on ranks, and which of several failures is the cause that a person should see.

When one rank fails, its peers soon fail too: their collectives lose a connection or run out of time. So failures are
ranked: a process that died explains everything, then an exception of a rank's own, then a lost connection, then silence.
Among equals the first one seen wins.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.errors import EngineError, EngineLostError, PeerLostError, RankLostError
from hybridrl.reshard.lost_peer import is_lost_peer


class FailureKind(enum.IntEnum):
    """Kinds of failure, the most telling first."""

    DIED = 0
    RAISED = 1
    CONNECTION = 2
    TIMED_OUT = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's failure.

    Attributes:
        phase: What the role was asked to do, e.g. "update".
        text: The rank's own traceback, or what is known instead of one.
        is_replaceable: Whether the rank died and can be started again by itself.
    """

    role: str
    rank: int
    phase: str
    kind: FailureKind
    text: str
    is_replaceable: bool = False


class ReplaceableRankLostError(RankLostError):
    """Ranks died that can be started again by themselves. All calls that were waited for have ended, and no process was ended.

    Attributes:
        failures: Of the dead ranks.
    """

    def __init__(self, message: str, failures: Sequence[Failure]) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


def kind_of(error: BaseException) -> FailureKind:
    """Tell a rank's own exception from one that only reports the failure of a peer or of its engine."""
    if isinstance(error, EngineLostError):
        return FailureKind.DIED
    is_of_peer = isinstance(error, (PeerLostError, RankLostError)) or is_lost_peer(error)
    return FailureKind.CONNECTION if is_of_peer else FailureKind.RAISED


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that explains the others; `failures` are in the order in which they were seen."""
    return min(failures, key=lambda failure: failure.kind)


def lost_ranks(failures: Sequence[Failure]) -> list[Failure]:
    """Return the deaths of replaceable ranks, if they explain all failures: the others only lost their connection to them."""
    lost = [failure for failure in failures if failure.is_replaceable]
    return lost if all(f.is_replaceable or f.kind is FailureKind.CONNECTION for f in failures) else []


def to_error(failures: Sequence[Failure]) -> EngineError:
    """Return the error that names the root cause and lists the ranks that followed it.

    Its class says whether the cause is an exception of the code's own, which would come again.
    """
    cause = root_cause(failures)
    same = [f for f in failures if (f.role, f.phase, f.kind) == (cause.role, cause.phase, FailureKind.TIMED_OUT)]
    if cause.kind is FailureKind.TIMED_OUT:
        ranks = ", ".join(str(failure.rank) for failure in same)
        return RankLostError(
            f"{cause.role} rank{'s' if len(same) > 1 else ''} {ranks}: no answer in phase {cause.phase}; {cause.text}"
        )
    verb = {FailureKind.DIED: "died", FailureKind.RAISED: "failed", FailureKind.CONNECTION: "lost a connection"}[
        cause.kind
    ]
    others = sorted({f"{f.role} rank {f.rank}" for f in failures} - {f"{cause.role} rank {cause.rank}"})
    followed = f"\n(after it failed: {', '.join(others)})" if others else ""
    error = EngineError if cause.kind is FailureKind.RAISED else RankLostError
    return error(f"{cause.role} rank {cause.rank} {verb} in phase {cause.phase}:\n{cause.text.strip()}{followed}")
