"""A run whose replica is killed goes on in place, and comes to what a run that nobody touched comes to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_test.py"


def test_a_run_survives_the_end_of_its_sampler_with_the_same_metrics_and_samples(tmp_path: Path) -> None:
    where = ("--targets", "sampler", "--phases", "rollout")
    options = ("--kills", "1", "--steps", "4", "--lag", "0", "--seed", "1", "--folder", str(tmp_path))
    outcome = subprocess.run([sys.executable, SCRIPT, *where, *options], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "1 kills, 0 of which ended the run and 1 of which it survived in place" in outcome.stdout
    assert [row["rollout/restarts"] for row in read_metrics(tmp_path / "killed")][-1] == 1
    log = (tmp_path / "killed.log").read_text()
    assert "rollout replica 0 died in phase rollout" in log and "(restart 1 of 1)" in log
