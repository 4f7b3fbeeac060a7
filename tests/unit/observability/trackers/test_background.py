"""A tracker whose server does not answer holds up neither the steps nor the end of a run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hybridrl.observability.progress import PlainProgress
from hybridrl.observability.recorder import RunRecorder
from hybridrl.observability.records import Metric, Outcome
from hybridrl.observability.trackers.background import BackgroundTracker


class Server:
    """A tracker that answers once it may; what it was told comes in order, and by another thread than the test's."""

    name = "remote"

    def __init__(self, *, failing_step: int | None = None) -> None:
        self.may_answer = threading.Event()
        self.told: list[object] = []
        self.threads: set[threading.Thread] = set()
        self._failing_step = failing_step

    def append(self, step: int, metrics: Mapping[str, Metric]) -> None:
        self.may_answer.wait()
        self.threads.add(threading.current_thread())
        self.told.append((step, dict(metrics)))
        if step == self._failing_step:
            raise ConnectionError("the server is gone")

    def close(self, outcome: Outcome) -> None:
        self.may_answer.wait()
        self.told.append(outcome)


@pytest.fixture
def silent() -> Iterator[Server]:
    server = Server()
    yield server
    server.may_answer.set()


def record(folder: Path, tracker: BackgroundTracker, num_steps: int) -> int:
    """Run `num_steps` steps with a tracker; return how many rows the run's own file has."""
    with RunRecorder(folder, "calc", "name: calc\n", num_steps, progress=PlainProgress(num_steps)) as recorder:
        recorder.track(tracker)
        for step in range(num_steps):
            recorder.record_step(step, {"reward/mean": 0.5}, [])
    return len((folder / "calc" / "metrics.jsonl").read_text().splitlines())


def test_a_tracker_gets_every_step_in_order_and_the_end_on_one_thread_that_then_ends(silent: Server) -> None:
    tracker = BackgroundTracker(silent)
    metrics = {"reward/mean": 0.5}
    for step in range(5):
        metrics["reward/mean"] = step / 10
        tracker.append(step, metrics)
    assert silent.told == []
    silent.may_answer.set()
    tracker.close(Outcome.FAILED)
    assert silent.told == [*((step, {"reward/mean": step / 10}) for step in range(5)), Outcome.FAILED]
    (thread,) = silent.threads
    assert thread is not threading.current_thread() and not thread.is_alive()


def test_a_server_that_takes_nothing_is_given_up_once_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], silent: Server
) -> None:
    tracker = BackgroundTracker(silent, max_pending_steps=3)
    began_s = time.monotonic()
    assert record(tmp_path, tracker, num_steps=8) == 8
    assert time.monotonic() - began_s < 10.0, "it was waited for at the end"
    given_up = "remote: TimeoutError: it has not taken the metrics of the last 3 steps; the run goes on without it"
    assert capsys.readouterr().out.count(given_up) == 1


def test_a_server_that_does_not_let_a_run_finish_is_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], silent: Server
) -> None:
    began_s = time.monotonic()
    assert record(tmp_path, BackgroundTracker(silent, close_timeout_s=0.2), num_steps=2) == 2
    assert time.monotonic() - began_s < 10.0
    assert "remote: TimeoutError: not finished 0.2 s after the run; what it has not sent is lost" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("failing_step", [0, 1], ids=["before other steps", "at the last step"])
def test_what_the_tracker_raises_gives_it_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failing_step: int
) -> None:
    server = Server(failing_step=failing_step)
    server.may_answer.set()
    assert record(tmp_path, BackgroundTracker(server), num_steps=2) == 2
    assert [step for step, _ in server.told] == list(range(failing_step + 1)), "nor is it told the end"
    given_up = "remote: ConnectionError: the server is gone; the run goes on without it"
    assert capsys.readouterr().out.count(given_up) == 1


STUCK_END = """
import atexit, time
from hybridrl.cli import main as cli
from hybridrl.observability.trackers.background import BackgroundTracker

class Silent:
    name = "remote"

BackgroundTracker(Silent())
atexit.register(time.sleep, 1000)
cli.main = lambda: 75
print("told")
cli.run()
"""


def test_what_a_client_does_at_the_end_of_the_process_does_not_hold_up_its_exit_code() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK_END], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (75, "told\n"), ended.stderr
