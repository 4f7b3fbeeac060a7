"""GPUs and drivers that would stop a run, as nvidia-smi tells of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hybridrl.cli.doctor.devices import devices
from hybridrl.cli.doctor.finding import Finding, ProgramError, Verdict, ask

H100 = "NVIDIA H100 80GB HBM3, 580.65.06, 81559 MiB, 0\n"
UP = "GPU 0: NVIDIA H100\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"


def smi(listed: str, nvlink: str = UP) -> Callable[[Sequence[str]], str]:
    return lambda command: nvlink if "nvlink" in command else listed


def found(listed: str, nvlink: str = UP, cuda: str | None = "13.0") -> dict[str, Finding]:
    return {finding.what: finding for finding in devices(smi(listed, nvlink), cuda)}


def test_a_sound_node_is_ok() -> None:
    findings = found(2 * H100)
    assert {finding.verdict for finding in findings.values()} == {Verdict.OK}
    assert findings["GPUs"].state == "2 x NVIDIA H100 80GB HBM3, 81559 MiB"
    assert findings["NVLink"].state == "2 links of 26.562 GB/s and more"


def test_one_gpu_needs_no_nvlink() -> None:
    assert "NVLink" not in found(H100, nvlink="")


@pytest.mark.parametrize(
    ("listed", "nvlink", "cuda", "what", "verdict", "words"),
    [
        (H100.replace("580", "570"), UP, "13.0", "driver", Verdict.PROBLEM, "install driver 580 or newer"),
        (H100, UP, None, "driver", Verdict.WARNING, "make setup PLATFORM=gpu"),
        (H100.replace(", 0\n", ", 3\n"), UP, "13.0", "GPU memory errors", Verdict.PROBLEM, "drain the node"),
        (H100 + H100.replace("H100", "A100"), UP, "13.0", "GPUs", Verdict.WARNING, "choose equal ones"),
        (2 * H100, UP + "\t Link 2: <inactive>\n", "13.0", "NVLink", Verdict.PROBLEM, "nvidia-fabricmanager"),
        (2 * H100, "", "13.0", "NVLink", Verdict.WARNING, "PCIe is slow"),
        (
            2 * H100,
            "\t Link 0: <inactive>\n",
            "13.0",
            "NVLink",
            Verdict.WARNING,
            "PCIe is slow; if there should be some",
        ),
        ("", UP, "13.0", "GPUs", Verdict.PROBLEM, "drain the node"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(
    listed: str, nvlink: str, cuda: str | None, what: str, verdict: Verdict, words: str
) -> None:
    finding = found(listed, nvlink, cuda)[what]
    assert finding.verdict is verdict and words in finding.advice


def test_gpus_without_memory_errors_to_count_are_fine() -> None:
    assert found(H100.replace(", 0\n", ", [N/A]\n"))["GPU memory errors"].verdict is Verdict.OK


def test_a_missing_driver_matters_to_a_torch_for_gpus_only() -> None:
    (cpu,), (gpu,) = devices(lambda command: None, None), devices(lambda command: None, "13.0")
    assert cpu.verdict is Verdict.OK and gpu.verdict is Verdict.WARNING and "--gpus all" in gpu.advice


def test_a_driver_that_hangs_or_fails_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for script, state in (
        ("exec sleep 5", "nvidia-smi did not answer within 0.2 s"),
        ("echo no devices >&2; exit 9", "no devices"),
        ("exit 9", "nvidia-smi ended with 9"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        (finding,) = devices(lambda command: ask(command, 0.2), "13.0")
        assert finding.verdict is Verdict.PROBLEM and finding.state == state


def test_only_the_links_are_in_doubt_when_they_cannot_be_asked() -> None:
    def answer(command: Sequence[str]) -> str:
        if "nvlink" in command:
            raise ProgramError("not supported")
        return 2 * H100

    findings = list(devices(answer, "13.0"))
    assert findings[-1] == Finding("NVLink", Verdict.WARNING, "not supported", "GPUs reach each other over PCIe only")
