"""`hybridrl doctor` as a whole, on the machine that it runs on."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from hybridrl.cli.doctor import command
from hybridrl.cli.doctor.finding import Finding, Verdict
from hybridrl.cli.main import main


def test_this_environment_is_listed_without_an_engine() -> None:
    code = "import sys; from hybridrl.cli.main import main; main(['doctor']); print({'torch', 'ray', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("set()")
    assert importlib.metadata.version("torch") in done.stdout
    for subject in ("kernels", "GPUs", "fabric", "shared memory", "open files", "clock", "Ray"):
        assert f" {subject} " in done.stdout


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.OK, 0), (Verdict.WARNING, 0), (Verdict.PROBLEM, 1)])
def test_only_a_problem_fails_and_what_is_fine_has_no_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verdict: Verdict, code: int
) -> None:
    monkeypatch.setattr(command, "examine", lambda: [Finding("kernels", verdict, "seen", "build")])
    assert main(["doctor"]) == code
    assert ("build" in capsys.readouterr().out) is (verdict is not Verdict.OK)
