"""When a run counts as hung: nothing moved for the limit; and how its main thread is brought to end it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hybridrl.config.schema import TrainerConfig
from hybridrl.controller import hang_watch
from hybridrl.controller.hang_watch import HangWatch
from hybridrl.errors import EngineError, HangError
from hybridrl.observability.heartbeat import Identity
from hybridrl.observability.stacks import ProcessReport
from hybridrl.roles.group import Calls, RoleFuture, RoleGroup
from tests.processes import still_running

LIMIT_S = 0.4
STARTUP_S = 2.0


class FakeNodes:
    """Processes whose work is what a function of the seconds says."""

    session = "fake"

    def __init__(self, work: Callable[[float], int], work_while_collecting: int = 0, collecting_s: float = 0.0) -> None:
        self.started = time.monotonic()
        self.work, self.more, self.collecting_s = work, work_while_collecting, collecting_s
        self.num_collected = 0
        self.is_collecting = False
        self.is_killed = False

    def progress(self) -> list[dict[int, int]]:
        return [{1: self.work(time.monotonic() - self.started) + self.more * self.num_collected}]

    def collect(self, timeout_s: float) -> list[ProcessReport]:
        self.is_collecting = True
        time.sleep(self.collecting_s)
        self.num_collected += 1
        return [ProcessReport(Identity("fake", "actor", 1), 77, psutil.STATUS_STOPPED)]

    def kill(self) -> None:
        self.is_killed = True


def watch(tmp_path: Path, nodes: FakeNodes, startup_s: float = STARTUP_S) -> HangWatch:
    timeouts = TrainerConfig(hang_timeout_s=LIMIT_S, startup_timeout_s=startup_s)
    made = HangWatch(timeouts, tmp_path, lambda: ("train",), exit_code=75)
    made.nodes = nodes  # type: ignore[assignment]
    return made


def test_a_look_that_fails_is_told_and_the_watch_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work(seconds: float) -> int:
        return 1 if seconds > 2 * LIMIT_S else int("no number")

    nodes, started = FakeNodes(work), time.monotonic()
    with pytest.raises(HangError), watch(tmp_path, nodes) as made, made.raised(), made.steps():
        time.sleep(20)
    assert time.monotonic() - started > 3 * LIMIT_S
    assert "ValueError: invalid literal" in capsys.readouterr().err


def test_a_run_in_which_nothing_moves_ends_with_the_verdict_and_its_processes(tmp_path: Path) -> None:
    nodes, started = FakeNodes(lambda seconds: 0), time.monotonic()
    with pytest.raises(HangError) as caught, watch(tmp_path, nodes) as made, made.raised(), made.steps():
        time.sleep(20)
    assert time.monotonic() - started >= LIMIT_S
    sentence, where = str(caught.value).splitlines()
    assert re.fullmatch(r"hang in phase train: no progress for \d+ s; actor rank 1 is stopped by a signal", sentence)
    assert where == f"The stacks of all 1 processes are in {tmp_path}/hang/stacks.txt"
    assert nodes.is_killed
    assert (tmp_path / "hang" / "stacks.txt").is_file()


def test_a_verdict_that_cannot_be_written_is_raised_all_the_same(tmp_path: Path) -> None:
    nodes = FakeNodes(lambda seconds: 0)
    with pytest.raises(HangError) as caught, watch(tmp_path / "gone", nodes) as made, made.raised(), made.steps():
        time.sleep(20)
    assert "actor rank 1 is stopped by a signal\nThe stacks of all 1 processes could not be written: [Errno 2]" in str(
        caught.value
    )


def test_a_look_that_hangs_itself_does_not_keep_the_run_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_watch, "_LOOK_S", 0.3)
    nodes = FakeNodes(lambda seconds: 0, collecting_s=60.0)
    with pytest.raises(HangError) as caught, watch(tmp_path, nodes) as made, made.raised(), made.steps():
        time.sleep(20)
    assert re.match(
        r"hang in phase train: no progress for \d+ s; looking at the processes gave no answer", str(caught.value)
    )
    assert nodes.is_killed


def test_a_call_that_advances_may_take_as_long_as_it_likes(tmp_path: Path) -> None:
    nodes, started = FakeNodes(lambda seconds: min(int(seconds / (LIMIT_S / 2)), 8)), time.monotonic()
    with pytest.raises(HangError), watch(tmp_path, nodes) as made, made.raised(), made.steps():
        time.sleep(20)
    assert time.monotonic() - started >= 4 * LIMIT_S + LIMIT_S


def test_what_moves_while_stacks_are_taken_is_no_hang(tmp_path: Path) -> None:
    nodes = FakeNodes(lambda seconds: 0, work_while_collecting=1)
    with watch(tmp_path, nodes) as made, made.raised(), made.steps():
        time.sleep(3 * LIMIT_S)
    assert nodes.num_collected >= 1 and not nodes.is_killed


def test_the_bound_of_a_wait_before_roles_start_comes_before_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_watch, "_CLEAN_UP_S", 2.0)
    nodes = FakeNodes(lambda seconds: 0)
    with pytest.raises(EngineError, match="no room"), watch(tmp_path, nodes):
        time.sleep(STARTUP_S)
        raise EngineError("the cluster has no room")
    assert not nodes.num_collected


def test_an_error_of_the_main_thread_during_the_look_is_the_one_that_ends_the_run(tmp_path: Path) -> None:
    nodes = FakeNodes(lambda seconds: 0, collecting_s=1.0)
    with pytest.raises(EngineError, match="rank died"), watch(tmp_path, nodes) as made, made.raised(), made.steps():
        while not nodes.is_collecting:
            time.sleep(0.01)
        raise EngineError("a rank died")
    assert nodes.num_collected and not nodes.is_killed


def test_outside_the_steps_and_while_a_role_starts_the_limit_is_that_of_a_start(tmp_path: Path) -> None:
    nodes, started = FakeNodes(lambda seconds: 0), time.monotonic()
    with pytest.raises(HangError), watch(tmp_path, nodes) as made, made.raised():
        time.sleep(20)
    assert time.monotonic() - started >= 0.9 * STARTUP_S
    with watch(tmp_path, nodes) as made, made.raised(), made.steps():
        starting = _future("start", made.calls)
        time.sleep(2 * LIMIT_S)
        assert starting.pending()


def test_a_persons_ctrl_c_stays_one(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), watch(tmp_path, FakeNodes(lambda seconds: 0)) as made, made.raised():
        raise KeyboardInterrupt


def test_the_watch_ends_with_its_context(tmp_path: Path) -> None:
    with watch(tmp_path, FakeNodes(lambda seconds: 0)):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "hybridrl-hang-watch"]


def test_calls_that_are_not_answered_are_known() -> None:
    calls = Calls()
    future = _future("update", calls)
    assert [(call.role, call.rank, call.phase) for call in calls.pending()] == [
        ("actor", 4, "update"),
        ("actor", 5, "update"),
    ]
    del future
    assert not calls.pending()


def test_what_another_run_of_the_process_left_unanswered_is_nobodys_business(tmp_path: Path) -> None:
    left = [_future(phase, Calls()) for phase in ("start", "update")]
    nodes = FakeNodes(lambda seconds: 0)
    with pytest.raises(HangError) as caught, watch(tmp_path, nodes, 3600.0) as made, made.raised(), made.steps():
        open_call = _future("train", made.calls)
        time.sleep(20)
    assert str(caught.value).startswith("hang in phase train: no progress")
    assert all(future.pending() for future in (open_call, *left))


def _future(phase: str, calls: Calls) -> RoleFuture[object]:
    group = RoleGroup("actor", [None, None], [0, 0], [4, 5], calls)  # type: ignore[list-item]
    return RoleFuture(group, phase, [object(), object()], list, 100.0)


STUCK = """
import ctypes, subprocess, sys
from pathlib import Path
from hybridrl.config.schema import TrainerConfig
from hybridrl.controller import hang_watch

hang_watch._REACT_S = 0.5
child = subprocess.Popen(["sleep", "100"])
print(child.pid, flush=True)

def deadlock():
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # in C, and no signal interrupts it

config = TrainerConfig(hang_timeout_s=0.5)
with hang_watch.HangWatch(config, Path(sys.argv[1]), lambda: ("reward",), 75) as watch, watch.raised(), watch.steps():
    deadlock()
"""


def test_a_main_thread_that_cannot_be_interrupted_is_ended_with_all_children(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUCK, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 75, ended.stderr
    assert "hybridrl: the run failed (HangError)\n  hang in phase reward: no progress for" in ended.stderr
    assert "controller is in `deadlock` (<string>:" in ended.stderr
    assert not still_running([int(ended.stdout)], within_s=5.0)
    assert "deadlock" in (tmp_path / "hang" / "stacks.txt").read_text()
