"""Of several failures a person sees the one that explains the others, with that rank's own words."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hybridrl.errors import EngineError, EngineLostError, PeerLostError, RankLostError, ReshardError
from hybridrl.roles.failure import Failure, FailureKind, kind_of, root_cause, to_error

RAISED = Failure("actor", 2, "update", FailureKind.RAISED, "Traceback ...\nValueError: bad row")
LOST = Failure("actor", 0, "update", FailureKind.CONNECTION, "RuntimeError: Connection closed by peer")
DIED = Failure("actor", 3, "update", FailureKind.DIED, "its process ended")
SILENT = [Failure("actor", rank, "update", FailureKind.TIMED_OUT, "gave up after 5 s") for rank in (1, 3)]


def test_a_death_explains_exceptions_and_an_exception_explains_lost_connections() -> None:
    assert root_cause([LOST, RAISED, DIED]) is DIED
    assert root_cause([LOST, RAISED]) is RAISED
    assert root_cause([SILENT[0], LOST]) is LOST


def test_among_equals_the_first_seen_wins() -> None:
    later = Failure("actor", 1, "update", FailureKind.RAISED, "KeyError")
    assert root_cause([RAISED, later]) is RAISED
    assert root_cause([later, RAISED]) is later


def test_the_error_names_role_rank_and_phase_and_shows_the_traceback_and_who_followed() -> None:
    message = str(to_error([LOST, RAISED]))
    assert message.startswith("actor rank 2 failed in phase update:\nTraceback ...\nValueError: bad row")
    assert "(after it failed: actor rank 0)" in message
    assert str(to_error([DIED])) == "actor rank 3 died in phase update:\nits process ended"


def test_what_an_exception_did_not_cause_is_an_error_of_its_own_class() -> None:
    assert type(to_error([LOST, RAISED])) is EngineError, "it would come again"
    assert [type(to_error([failure])) for failure in (DIED, LOST, SILENT[0])] == [RankLostError] * 3


def test_a_time_out_names_every_silent_rank_and_the_seconds() -> None:
    assert str(to_error(SILENT)) == "actor ranks 1, 3: no answer in phase update; gave up after 5 s"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:4711"), FailureKind.CONNECTION),
        (
            dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network error"),
            FailureKind.CONNECTION,
        ),
        (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error"), FailureKind.RAISED),
        (ConnectionResetError(104, "Connection reset by peer"), FailureKind.CONNECTION),
        (PeerLostError("actor rank 0 closed its side of the weight sync"), FailureKind.CONNECTION),
        (RankLostError("training rank 1: the 4 ranks did not meet"), FailureKind.CONNECTION),
        (ReshardError("actor rank 0: no 4096 bytes of shared memory"), FailureKind.RAISED),
        (ValueError("Connection closed by peer is no number"), FailureKind.RAISED),
        (EngineLostError("rollout engine: its processes have ended"), FailureKind.DIED),
        (RuntimeError(), FailureKind.RAISED),
    ],
)
def test_the_type_tells_what_kind_it_is_and_the_text_where_a_library_has_no_type(
    error: Exception, kind: FailureKind
) -> None:
    assert kind_of(error) is kind
