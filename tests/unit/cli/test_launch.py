"""`hybridrl launch` composes what sbatch is called with; a real scheduler is in tests/slurm."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hybridrl.cli.launch import SCRIPT
from hybridrl.cli.main import main
from tests.unit.preflight.experiments import write_experiment

GOES_ON = ["checkpoint.every_steps=5", "trainer.resume=auto"]


def test_a_dry_run_prints_the_command_and_submits_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    config = write_experiment(tmp_path)
    options = ["--nodes", "4", "--time", "8:00:00", "--container", "pyxis:hybridrl.sqsh", "--sbatch-option=--qos=high"]
    assert main(["launch", str(config), "seed=9", "--slurm", "--dry-run", *options, "name=x"]) == 0
    words = shlex.split(capsys.readouterr().out)
    exported = "--export=ALL,HYBRIDRL_GOES_ON=0,HYBRIDRL_CONTAINER=pyxis:hybridrl.sqsh"
    assert {"--nodes=4", "--time=8:00:00", "--qos=high", exported} < set(words)
    assert words[-4:] == [str(SCRIPT), str(config), "seed=9", "name=x"]
    assert SCRIPT.is_file()
    assert "--no-requeue" not in words, "the job could not leave an unfit node"
    assert main(["launch", str(config), *GOES_ON, "--slurm", "--dry-run", "--nodes", "4"]) == 0
    assert "--export=ALL,HYBRIDRL_GOES_ON=1" in shlex.split(capsys.readouterr().out)


def test_what_would_replace_the_variables_of_the_job_is_refused(tmp_path, capsys):
    command = ["launch", str(write_experiment(tmp_path)), "--slurm", "--dry-run", "--nodes", "1"]
    assert main([*command, "--sbatch-option=--export=NONE"]) == 2
    assert "would replace what the job's script needs" in capsys.readouterr().err


def test_a_chain_waits_job_for_job(tmp_path, capsys, monkeypatch):
    program = tmp_path / "sbatch"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nwc -l < {tmp_path}/calls\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    command = ["launch", str(write_experiment(tmp_path)), "--slurm", "--nodes", "1", "--chain", "3"]
    assert main(command) == 2
    assert "each job would start over; set checkpoint.every_steps and trainer.resume=auto" in capsys.readouterr().err
    assert main([*command, *GOES_ON]) == 0
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


def test_settings_may_stand_anywhere_and_what_is_no_setting_is_refused(tmp_path, capsys):
    config = str(write_experiment(tmp_path))
    for words in (
        ["check", config, "seed=x"],
        ["check", config, "--sft", "seed=x"],
        ["plan", config, "--json", "seed=x"],
    ):
        assert main(words) == 2
        assert "seed" in capsys.readouterr().err
    for words in (["check", config, "--json", "seed=3"], ["report", str(tmp_path), "--output", "x", "--seed=3"]):
        with pytest.raises(SystemExit):
            main(words)
        assert "unrecognized arguments: --" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--nodes", "0"], ["--container", "docker:x"], ["--chain", "0"]])
def test_an_option_out_of_range_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        main(["launch", str(Path("x.yaml")), "--slurm", "--nodes", "1", *option])
    assert "expected" in capsys.readouterr().err
