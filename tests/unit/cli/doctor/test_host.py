"""What a node gives its processes, when it gives too little."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import psutil
import pytest

from hybridrl.cli.doctor.finding import Finding, Verdict
from hybridrl.cli.doctor.host import clock, clock_status, limits, memory, shared_memory


def test_little_shared_memory_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(64 << 20, 0, 64 << 20))
    finding = shared_memory(tmp_path)
    assert finding.verdict is Verdict.PROBLEM and "--ipc host" in finding.advice


@pytest.mark.parametrize(("free_gib", "verdict"), [(5, Verdict.WARNING), (7, Verdict.OK)])
def test_memory_for_the_demos_has_to_be_free(monkeypatch: pytest.MonkeyPatch, free_gib: int, verdict: Verdict) -> None:
    usage = psutil.virtual_memory()._replace(available=free_gib << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: usage)
    assert memory().verdict is verdict


def found(soft: dict[int, int], *, has_fabric: bool) -> dict[str, Finding]:
    def limit(kind: int) -> tuple[int, int]:
        return soft.get(kind, resource.RLIM_INFINITY), resource.RLIM_INFINITY

    return {finding.what: finding for finding in limits(limit, has_fabric=has_fabric)}


def test_unlimited_is_ok() -> None:
    findings = found({}, has_fabric=True)
    assert {finding.verdict for finding in findings.values()} == {Verdict.OK}
    assert findings["locked memory"].state == "unlimited"


@pytest.mark.parametrize(
    ("kind", "what", "advice"),
    [
        (resource.RLIMIT_NOFILE, "open files", "ulimit -n 65536"),
        (resource.RLIMIT_NPROC, "processes", "ulimit -u 16384"),
    ],
)
def test_low_limits_are_named_with_what_is_enough(kind: int, what: str, advice: str) -> None:
    finding = found({kind: 1024}, has_fabric=False)[what]
    assert (
        finding.verdict is Verdict.WARNING and finding.state == "1024, at most unlimited" and advice in finding.advice
    )


def test_locked_memory_matters_where_network_cards_lock_it() -> None:
    soft = {resource.RLIMIT_MEMLOCK: 65536}
    assert found(soft, has_fabric=False)["locked memory"].verdict is Verdict.OK
    finding = found(soft, has_fabric=True)["locked memory"]
    assert finding.verdict is Verdict.PROBLEM and finding.state == "65536 bytes"


@pytest.mark.parametrize(
    ("status", "verdict", "state"),
    [
        (0x40, Verdict.WARNING, "not synchronised"),
        (0x2001, Verdict.OK, "synchronised"),
        (None, Verdict.OK, "its status cannot be read here"),
    ],
)
def test_a_clock_that_no_server_sets_is_found(status: int | None, verdict: Verdict, state: str) -> None:
    finding = clock(lambda: status)
    assert (finding.verdict, finding.state) == (verdict, state)


def test_the_kernel_tells_the_status_of_its_clock() -> None:
    status = clock_status()
    assert status is None or 0 <= status < 1 << 16
