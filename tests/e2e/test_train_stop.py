"""Stopping the real stack: Ctrl-C as a person types it, for the whole foreground process group; SIGTERM as a batch system
sends it, to the command alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import CALC, one_rank, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def _ctrl_c(pid: int) -> None:
    os.killpg(pid, signal.SIGINT)


def _terminate(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


@pytest.mark.parametrize("stop", [_ctrl_c, _terminate])
def test_a_stopped_run_ends_everything_and_leaves_its_folder_whole(tmp_path: Path, stop: Callable[[int], None]) -> None:
    command = [sys.executable, "-m", "hybridrl.cli.main", "train", str(CALC), f"runs_dir={tmp_path}", "name=stopped"]
    with subprocess.Popen(
        [*command, *one_rank()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as run:
        folder = tmp_path / "stopped"
        deadline = time.monotonic() + 200
        while not (folder / "rollouts" / "step_000001.parquet").exists():
            assert run.poll() is None and time.monotonic() < deadline, run.stdout and run.stdout.read()
            time.sleep(0.1)
        family = psutil.Process(run.pid).children(recursive=True)
        stop(run.pid)
        output, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    assert output.strip().splitlines()[-1] == f"interrupted; report: {folder / 'report.html'}"
    assert not psutil.wait_procs(family, timeout=10)[1]
    steps = [row["step"] for row in read_metrics(folder)]
    assert steps[:2] == [0, 1]
    assert len(list((folder / "rollouts").glob("*.parquet"))) == len(steps)
    assert "Traceback" not in output
