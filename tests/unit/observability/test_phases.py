import pytest

from hybridrl.observability.phases import PhaseTimer


def ignore(name: str, start_s: float, end_s: float) -> None:
    pass


def test_time_of_a_phase_adds_up_over_a_step_and_starts_anew_after_it():
    timer = PhaseTimer(lambda running: None, ignore)
    for _ in range(2):
        with timer.phase("train"):
            pass

    first, second = timer.take(), timer.take()

    assert set(first) == {"time_s/train", "time_s/step"}
    assert 0 < first["time_s/train"] <= first["time_s/step"]
    assert set(second) == {"time_s/step"}


def test_a_phase_that_raises_is_timed_and_left():
    seen = []
    ended = []
    timer = PhaseTimer(seen.append, lambda name, start_s, end_s: ended.append((name, start_s <= end_s)))

    with pytest.raises(ValueError, match="broken"), timer.phase("rollout"):
        raise ValueError("broken")

    assert "time_s/rollout" in timer.take()
    assert seen == [("rollout",), ()]
    assert ended == [("rollout", True)]


def test_overlapping_phases_are_shown_together():
    seen = []
    timer = PhaseTimer(seen.append, ignore)

    with timer.phase("rollout"), timer.phase("train"):
        pass

    assert seen == [("rollout",), ("rollout", "train"), ("rollout",), ()]
