"""What Ray puts in place of a rank's answer: a lost process may go well next time, an exception would come again."""

from __future__ import annotations

import pytest
from ray import exceptions

from hybridrl.errors import RankLostError
from hybridrl.roles.failure import Failure, FailureKind, to_error
from hybridrl.roles.group import failure_of

LOST = [
    exceptions.ActorDiedError(),
    exceptions.ActorUnavailableError("no route", None),
    exceptions.WorkerCrashedError(),
    exceptions.OutOfMemoryError("the node ran low on memory"),
    exceptions.LocalRayletDiedError(),
    exceptions.NodeDiedError("the node missed its heartbeats"),
    exceptions.ObjectLostError("ab", None, ""),
    *(kind("ab", None, "") for kind in (exceptions.ObjectFetchTimedOutError, exceptions.OwnerDiedError)),
    exceptions.ObjectReconstructionFailedError("ab"),
]
OWN = [
    exceptions.RaySystemError("cannot be unpickled"),
    exceptions.RuntimeEnvSetupError("no such file"),
    exceptions.OutOfDiskError("full"),
]


def _named(error: Exception) -> str:
    return type(error).__name__


@pytest.mark.parametrize("error", LOST, ids=_named)
def test_a_lost_process_has_died_whichever_of_rays_errors_says_so(error: exceptions.RayError) -> None:
    kind, text = failure_of(error)
    assert kind is FailureKind.DIED
    assert type(error).__name__ in text
    assert type(to_error([Failure("actor", 0, "update", kind, text)])) is RankLostError


@pytest.mark.parametrize("error", OWN, ids=_named)
def test_another_of_rays_errors_would_come_again(error: exceptions.RayError) -> None:
    assert failure_of(error)[0] is FailureKind.RAISED


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (ValueError("row 7 is odd"), FailureKind.RAISED),
        (exceptions.OwnerDiedError("ab", None, ""), FailureKind.CONNECTION),
        (exceptions.ActorDiedError(), FailureKind.CONNECTION),
    ],
    ids=["its own", "an argument is gone", "a process that it called is gone"],
)
def test_an_exception_that_a_rank_raised_is_told_by_its_cause(cause: Exception, kind: FailureKind) -> None:
    error = exceptions.RayTaskError("update", "Traceback of the rank", cause)
    found, text = failure_of(error)
    assert found is kind
    assert text == str(error)
