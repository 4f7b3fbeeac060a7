"""`hybridrl launch` composes what sbatch is called with; a real scheduler is in tests/slurm."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hybridrl.cli.launch import SCRIPT
from hybridrl.cli.main import main
from tests.unit.preflight.experiments import write_experiment


def test_a_dry_run_prints_the_command_and_submits_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    config = write_experiment(tmp_path)
    options = ["--nodes", "4", "--time", "8:00:00", "--container", "pyxis:hybridrl.sqsh", "--sbatch-option=--qos=high"]
    assert main(["launch", str(config), "seed=9", "--slurm", "--dry-run", *options]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:2] == ["sbatch", "--parsable"]
    assert {"--nodes=4", "--time=8:00:00", "--qos=high", "--export=ALL,HYBRIDRL_CONTAINER=pyxis:hybridrl.sqsh"} < set(
        words
    )
    assert words[-3:] == [str(SCRIPT), str(config), "seed=9"]
    assert SCRIPT.is_file()


def test_a_chain_waits_job_for_job(tmp_path, capsys, monkeypatch):
    program = tmp_path / "sbatch"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nwc -l < {tmp_path}/calls\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["launch", str(write_experiment(tmp_path)), "--slurm", "--nodes", "1", "--chain", "3"]) == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["--parsable", "--dependency=afterany:1", "--dependency=afterany:2"]
    assert "submitted job 3" in capsys.readouterr().out


def test_a_wrong_configuration_is_not_submitted(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert main(["launch", str(write_experiment(tmp_path)), "seed=x", "--slurm", "--nodes", "1"]) == 2
    assert "seed" in capsys.readouterr().err


def test_a_machine_without_slurm_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert main(["launch", str(write_experiment(tmp_path)), "--slurm", "--nodes", "1"]) == 1
    assert "sbatch is not on PATH" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--nodes", "0"], ["--container", "docker:x"], ["--chain", "0"]])
def test_an_option_out_of_range_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        main(["launch", str(Path("x.yaml")), "--slurm", "--nodes", "1", *option])
    assert "expected" in capsys.readouterr().err
