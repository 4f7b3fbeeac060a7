"""Waiting for several calls at once: answers, the first failure, the grace for its causes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hybridrl.errors import EngineError
from hybridrl.roles.failure import Failure, FailureKind, ReplaceableRankLostError
from hybridrl.roles.future import wait_all, wait_for, wait_for_both


class Scripted:
    """A future that gets its answer or its failures after some polls; -1 polls: never."""

    def __init__(self, polls: int, value: object = None, failures: Sequence[Failure] = ()) -> None:
        self.polls, self._value, self._failures = polls, value, failures
        self.is_abandoned = False

    def poll(self, wait_s: float) -> bool:
        if self.polls != 0:
            self.polls -= 1
            time.sleep(min(wait_s, 0.005))
        return self.polls == 0

    def failures(self) -> Sequence[Failure]:
        return self._failures if self.polls == 0 else ()

    def value(self) -> object:
        return self._value

    def abandon(self) -> None:
        self.is_abandoned = True


def _failure(kind: FailureKind, role: str = "actor", rank: int = 0) -> Failure:
    return Failure(role, rank, "weight_sync", kind, "text")


def test_answers_come_back_in_order_however_long_each_took() -> None:
    assert wait_for(Scripted(3, "a")) == "a"
    assert wait_for_both(Scripted(4, "a"), Scripted(1, "b")) == ("a", "b")


def test_a_failure_on_one_side_does_not_wait_for_the_silent_other_side() -> None:
    sender, receiver = Scripted(1, failures=[_failure(FailureKind.DIED)]), Scripted(-1)
    started = time.monotonic()
    with pytest.raises(EngineError, match="actor rank 0 died in phase weight_sync"):
        wait_all([receiver, sender], grace_s=0.1)
    assert time.monotonic() - started < 2.0
    assert sender.is_abandoned and receiver.is_abandoned


def test_the_cause_is_named_even_when_its_victim_is_seen_first() -> None:
    receiver = Scripted(1, failures=[_failure(FailureKind.CONNECTION, "rollout", 1)])
    sender = Scripted(8, failures=[_failure(FailureKind.DIED, "actor", 2)])
    with pytest.raises(EngineError, match="actor rank 2 died") as caught:
        wait_all([receiver, sender], grace_s=2.0)
    assert "after it failed: rollout rank 1" in str(caught.value)


def test_nothing_is_abandoned_when_all_goes_well() -> None:
    futures = [Scripted(2), Scripted(1)]
    wait_all(futures)
    assert not any(future.is_abandoned for future in futures)


def test_a_call_in_flight_beside_is_not_waited_for_but_its_failure_ends_the_wait() -> None:
    assert wait_for(Scripted(2, "a"), beside=[Scripted(-1)]) == "a"
    training, rollout = Scripted(-1), Scripted(2, failures=[_failure(FailureKind.DIED, "rollout", 1)])
    with pytest.raises(EngineError, match="rollout rank 1 died"):
        wait_all([training], grace_s=0.1, beside=[rollout])
    assert training.is_abandoned and rollout.is_abandoned


LOST = replace(_failure(FailureKind.DIED, "rollout", 1), is_replaceable=True)
CUT = _failure(FailureKind.CONNECTION, "actor", 0)


def test_the_death_of_a_replaceable_rank_is_told_once_every_call_has_ended_and_ends_no_process() -> None:
    sender, receiver = Scripted(10, failures=[CUT]), Scripted(1, failures=[LOST])
    with pytest.raises(ReplaceableRankLostError, match="rollout rank 1 died in phase weight_sync") as caught:
        wait_all([sender, receiver], grace_s=0.0)
    assert sender.polls == 0 and caught.value.failures == (LOST,)
    assert not sender.is_abandoned and not receiver.is_abandoned


def test_a_connection_that_is_lost_before_the_death_is_seen_does_not_cut_the_wait_short() -> None:
    sender, receiver, other = Scripted(1, failures=[CUT]), Scripted(5, failures=[LOST]), Scripted(40)
    with pytest.raises(ReplaceableRankLostError):
        wait_all([sender, receiver, other], grace_s=0.1)
    assert other.polls == 0


@pytest.mark.parametrize("kind", [FailureKind.DIED, FailureKind.RAISED, FailureKind.TIMED_OUT])
def test_any_other_failure_beside_the_death_of_a_replaceable_rank_ends_all(kind: FailureKind) -> None:
    other, receiver = Scripted(2, failures=[_failure(kind)]), Scripted(1, failures=[LOST])
    with pytest.raises(EngineError) as caught:
        wait_all([other, receiver], grace_s=0.1)
    assert not isinstance(caught.value, ReplaceableRankLostError)
    assert other.is_abandoned and receiver.is_abandoned
