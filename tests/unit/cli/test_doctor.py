"""`hybridrl doctor` looks, and says what to do; what it looks at is given to it here."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys

from hybridrl.cli import doctor
from hybridrl.cli.doctor import Verdict
from hybridrl.cli.main import main


def test_this_environment_is_fit(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert importlib.metadata.version("torch") in out and "shared memory" in out and "kernels" in out


def test_a_missing_package_is_bad_only_where_every_run_needs_it():
    def version_of(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    found = {finding.what: finding for finding in doctor.packages(version_of)}
    assert found["torch"].verdict is Verdict.BAD and found["torch"].advice == "run make setup"
    assert found["transformer-engine"].verdict is Verdict.NOTE


def test_little_shared_memory_is_bad(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(64 << 20, 0, 64 << 20))
    finding = doctor.shared_memory(tmp_path)
    assert finding.verdict is Verdict.BAD and "--ipc host" in finding.advice


def test_a_driver_that_hangs_or_fails_is_bad(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor, "_DRIVER_TIMEOUT_S", 0.2)
    for script, state in (
        ("exec sleep 5", "did not answer within 0.2 s"),
        ("echo no devices >&2; exit 9", "no devices"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        finding = doctor.devices()
        assert finding.verdict is Verdict.BAD and state in finding.state


def test_leftovers_are_named_with_the_command_that_removes_them(tmp_path):
    (tmp_path / "hybridrl-ray-x").mkdir()
    finding = doctor.leftovers(tmp_path)
    assert "1 folders" in finding.state and finding.verdict is not Verdict.BAD


def test_no_engine_is_imported():
    code = "import sys; from hybridrl.cli.main import main; main(['doctor']); print({'torch', 'ray', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("set()")
