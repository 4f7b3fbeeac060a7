"""Ctrl-C on the real stack, as a person types it: the whole foreground process group gets the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import CALC, one_rank, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_ctrl_c_ends_everything_and_leaves_the_run_folder_whole(tmp_path: Path) -> None:
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
        os.killpg(run.pid, signal.SIGINT)
        output, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    assert output.strip().splitlines()[-1] == f"interrupted; report: {folder / 'report.html'}"
    assert not psutil.wait_procs(family, timeout=10)[1]
    steps = [row["step"] for row in read_metrics(folder)]
    assert steps[:2] == [0, 1]
    assert len(list((folder / "rollouts").glob("*.parquet"))) == len(steps)
    assert "Traceback" not in output
