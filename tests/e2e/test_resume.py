"""A run whose processes are killed comes to what a run that nobody touched comes to, down to the last bit of the weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_test.py"


def test_two_kills_change_neither_metrics_nor_samples_nor_weights(tmp_path: Path) -> None:
    # This seed kills the controller while it saves, and a training rank while weights are synced.
    options = (
        "--kills",
        "2",
        "--steps",
        "6",
        "--seed",
        "336",
        "--lag",
        "1",
        "--no-in-place",
        "--folder",
        str(tmp_path),
    )
    outcome = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "2 kills, 2 of which ended the run" in outcome.stdout
    for name in ("killed", "undisturbed"):
        assert main(["export", str(tmp_path / name), str(tmp_path / f"{name}-hf")]) == 0
    killed, undisturbed = (
        load_file(tmp_path / f"{name}-hf" / "model.safetensors") for name in ("killed", "undisturbed")
    )
    assert killed.keys() == undisturbed.keys()
    assert all(torch.equal(killed[name], undisturbed[name]) for name in killed)
