"""What killed runs leave is told from what belongs to runs under way."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from hybridrl.cli.doctor.finding import Finding, Verdict
from hybridrl.cli.doctor.leftovers import Process, leftovers, running_processes


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("tmp", "shm", "proc"):
        (tmp_path / name).mkdir()
    return tmp_path


def found(folders: Path, *processes: Process, proc: Path | None = None) -> dict[str, Finding]:
    places = (folders / "tmp", folders / "shm", proc or folders / "proc")
    return {finding.what: finding for finding in leftovers(processes, *places)}


def raylet(folders: Path, parent: int) -> Process:
    return Process(70, parent, "raylet", f"raylet --temp_dir={folders}/tmp/hybridrl-ray-live")


def test_a_clean_machine_is_ok(folders: Path) -> None:
    assert {finding.verdict for finding in found(folders).values()} == {Verdict.OK}


def test_folders_of_killed_runs_are_named_with_the_command_that_removes_them(folders: Path) -> None:
    (folders / "tmp" / "hybridrl-ray-dead").mkdir()
    finding = found(folders)["Ray"]
    assert finding.verdict is Verdict.WARNING and finding.advice == f"rm -r {folders}/tmp/hybridrl-ray-*"


def test_the_folder_of_a_run_under_way_is_not_to_be_removed(folders: Path) -> None:
    (folders / "tmp" / "hybridrl-ray-live").mkdir()
    finding = found(folders, raylet(folders, parent=60))["Ray"]
    assert finding.verdict is Verdict.OK and finding.state == "1 processes of runs and clusters under way"
    (folders / "tmp" / "hybridrl-ray-dead").mkdir()
    assert found(folders, raylet(folders, parent=60))["Ray"].advice == f"rm -r {folders}/tmp/hybridrl-ray-dead"


def test_processes_whose_run_is_gone_are_to_be_killed(folders: Path) -> None:
    (folders / "tmp" / "hybridrl-ray-live").mkdir()
    worker, shell = Process(71, 1, "VLLM::EngineCor", "VLLM::EngineCore"), Process(72, 1, "bash", "bash")
    findings = found(folders, raylet(folders, parent=1), worker, shell)
    assert findings["Ray"].advice == "kill 70"
    assert findings["workers"].state == "1 workers whose run is gone" and "kill 71:" in findings["workers"].advice


def test_a_run_that_is_the_first_process_of_a_container_is_not_gone(folders: Path) -> None:
    (folders / "tmp" / "hybridrl-ray-live").mkdir()
    run = Process(1, 0, "hybridrl", "python /opt/hybridrl/venv/bin/hybridrl train calc.yaml")
    findings = found(folders, run, raylet(folders, parent=1), Process(71, 1, "ray::MegatronWo", "ray::MegatronWorker"))
    assert {finding.verdict for finding in findings.values()} == {Verdict.OK}


def test_segments_that_no_process_maps_are_to_be_removed(folders: Path) -> None:
    dead, live = (folders / "shm" / f"hybridrl-{name}-0" for name in ("dead", "live"))
    for path in (dead, live):
        path.write_bytes(bytes(mmap.PAGESIZE))
    with live.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        finding = found(folders, proc=Path("/proc"))["shared memory segments"]
    assert finding.verdict is Verdict.WARNING and finding.advice.startswith(
        f"rm {dead}, unless a container that shares "
    )


def test_a_segment_of_another_user_is_not_to_be_removed(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folders / "shm" / "hybridrl-theirs-0").write_bytes(b"x")
    monkeypatch.setattr("os.getuid", lambda: -1)
    assert found(folders)["shared memory segments"].verdict is Verdict.OK


def test_a_segment_that_is_removed_meanwhile_is_no_error(folders: Path) -> None:
    (folders / "shm" / "hybridrl-gone-0").symlink_to(folders / "nowhere")
    assert found(folders)["shared memory segments"].verdict is Verdict.OK


def test_segments_of_samplers_are_among_them_in_words_that_a_shell_does_not_expand(folders: Path) -> None:
    dead = folders / "shm" / "vllm_dist_ff82-tp:0-[0-1]-cpushm_0"
    dead.write_bytes(bytes(mmap.PAGESIZE))
    finding = found(folders, proc=Path("/proc"))["shared memory segments"]
    assert finding.advice.startswith(f"rm '{dead}', unless")


def test_a_process_that_maps_a_file_whose_name_is_no_text_is_looked_at_like_others(folders: Path) -> None:
    live = folders / "shm" / "hybridrl-live-0"
    live.write_bytes(bytes(mmap.PAGESIZE))
    maps = folders / "proc" / "7" / "maps"
    maps.parent.mkdir(parents=True)
    maps.write_bytes(b"0-1 r-xp 0 0:0 1 /b\xc3\n0-1 rw-s 0 0:0 2 " + bytes(live) + b"\n")
    assert found(folders, proc=folders / "proc")["shared memory segments"].verdict is Verdict.OK


def test_the_processes_of_this_machine_are_listed() -> None:
    assert any("pytest" in process.command for process in running_processes())
