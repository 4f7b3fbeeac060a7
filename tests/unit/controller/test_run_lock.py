"""One process at a time goes on with a run."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridrl.controller import run_lock
from hybridrl.controller.run_lock import sole_writer
from hybridrl.errors import ConfigError

OTHER = """
import sys, time
from pathlib import Path
from hybridrl.controller.run_lock import sole_writer

with sole_writer(Path(sys.argv[1]), print):
    print(flush=True)
    time.sleep(100)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run."""
    command = [sys.executable, "-c", OTHER, str(tmp_path / "runs" / "demo")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_run_that_another_process_writes_is_refused_with_its_name_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[str]
) -> None:
    monkeypatch.setattr(run_lock, "_WAIT_S", 1.0)
    told: list[str] = []
    with pytest.raises(ConfigError) as caught, sole_writer(tmp_path / "runs" / "demo", told.append):
        pytest.fail("two processes hold the run")
    assert f"{tmp_path}/runs/demo is in use by process {other.pid} on " in str(caught.value)
    assert str(caught.value).endswith(f"If its machine was lost, remove {tmp_path}/runs/.demo.lock")
    assert len(told) == 1 and told[0].endswith("waiting for its end, 1 s at most")


def test_the_end_of_the_other_process_however_it_comes_is_waited_for(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    with sole_writer(tmp_path / "runs" / "demo", lambda line: os.kill(other.pid, signal.SIGKILL)):
        assert (tmp_path / "runs" / ".demo.lock").read_text().startswith(f"process {os.getpid()} on ")


def test_other_runs_of_the_folder_are_free(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    with sole_writer(tmp_path / "runs" / "demo-2", pytest.fail):
        assert other.poll() is None


def test_removing_the_file_gives_the_run_free(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    (tmp_path / "runs" / ".demo.lock").unlink()
    with sole_writer(tmp_path / "runs" / "demo", pytest.fail):
        assert other.poll() is None


def test_a_job_that_was_put_back_does_not_wait_for_what_its_earlier_start_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: subprocess.Popen[str]
) -> None:
    (tmp_path / "runs" / ".demo.lock").write_text("process 7 on node-1, Slurm job 42")
    monkeypatch.setattr(run_lock, "_WAIT_S", 1.0)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    told: list[str] = []
    with pytest.raises(ConfigError), sole_writer(tmp_path / "runs" / "demo", told.append):
        pytest.fail("a job that was not put back has no earlier start")
    told.clear()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with sole_writer(tmp_path / "runs" / "demo", told.append):
        assert (tmp_path / "runs" / ".demo.lock").read_text().endswith(", Slurm job 42")
    assert (
        told[0].endswith("process 7 on node-1, Slurm job 42, an earlier start of this very job; going on")
        and len(told) == 1
    )


def test_a_folder_that_cannot_be_written_to_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    refused = pytest.raises(ConfigError, match=r"runs_dir: .*\.demo\.lock cannot be written")
    with refused, sole_writer(tmp_path / "runs" / "demo", pytest.fail):
        pytest.fail("held")


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with sole_writer(tmp_path / "runs" / "demo", pytest.fail):
        pass
