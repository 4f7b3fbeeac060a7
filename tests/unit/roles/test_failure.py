"""Of several failures a person sees the one that explains the others, with that rank's own words."""

from __future__ import annotations

from hybridrl.errors import EngineError, RankLostError
from hybridrl.roles.failure import Failure, FailureKind, kind_of_exception, root_cause, to_error

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


def test_only_the_last_line_of_a_traceback_decides_what_kind_it_is() -> None:
    gloo = "Traceback\n  File x\nRuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
    own = "Traceback\n  # Connection closed by peer is handled here\nValueError: negative length"
    assert kind_of_exception(gloo) is FailureKind.CONNECTION
    assert kind_of_exception(own) is FailureKind.RAISED
    assert kind_of_exception("") is FailureKind.RAISED
