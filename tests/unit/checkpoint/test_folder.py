"""Which checkpoints stay, which go, and which are seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.checkpoint.folder import CheckpointFolder, find_at, find_checkpoints
from hybridrl.checkpoint.manifest import MANIFEST
from hybridrl.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import write


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_stay_and_older_ones_go(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (10, 20, 30, 40):
        write(folder, step)
    assert names(tmp_path) == ["step_000030", "step_000040"]
    assert [each.manifest.step for each in find_checkpoints(tmp_path).complete] == [40, 30]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (999_999, 1_000_000, 1_000_001):
        write(folder, step)
    assert [each.manifest.step for each in find_checkpoints(tmp_path).complete] == [1_000_001, 1_000_000]


def test_the_one_that_the_run_went_on_from_stays(tmp_path: Path) -> None:
    resumed = write(CheckpointFolder(tmp_path, keep=1), 10)
    folder = CheckpointFolder(tmp_path, keep=1, resumed=tmp_path / "." / resumed.name)
    for step in (20, 30):
        write(folder, step)
    assert names(tmp_path) == ["step_000010", "step_000030"]


def test_until_a_new_one_is_complete_the_old_one_is_there_and_an_unfinished_one_does_not_count(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    write(folder, 10)
    begun = folder.begin(20)
    (begun / "actor_00000.safetensors").write_bytes(b"a part")
    found = find_checkpoints(tmp_path)
    assert [each.manifest.step for each in found.complete] == [10] and found.unfinished == (begun,)
    write(folder, 30)
    assert names(tmp_path) == ["step_000030"]


def test_a_damaged_one_does_not_take_the_place_of_one_that_is_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    write(folder, 10)
    (write(folder, 20) / "run.json").unlink()
    write(folder, 30)
    assert names(tmp_path) == ["step_000010", "step_000030"]


def test_damaged_and_unfinished_ones_are_told_apart_with_the_reason(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=5)
    for step in (10, 20, 30):
        write(folder, step)
    (tmp_path / "step_000020" / "run.json").write_bytes(b"")
    (tmp_path / "step_000030" / MANIFEST).unlink()
    (tmp_path / "notes").mkdir()
    found = find_checkpoints(tmp_path)
    assert [each.manifest.step for each in found.complete] == [10]
    assert found.damaged == (f"{tmp_path}/step_000020/run.json: 0 bytes, expected 3",)
    assert found.unfinished == (tmp_path / "step_000030",)


def test_a_step_that_is_written_again_is_invalid_until_it_is_complete(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    write(folder, 10)
    assert list(folder.begin(10).iterdir()) == []
    assert find_checkpoints(tmp_path).complete == ()
    folder.discard(10)
    assert names(tmp_path) == []


def test_a_checkpoint_is_found_in_itself_in_its_folder_and_in_its_run(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    folder = CheckpointFolder(root, keep=2)
    write(folder, 10)
    newest = write(folder, 20)
    for place in (newest, root, tmp_path / "run"):
        assert find_at(place).complete[0].folder == newest
    assert [path.name for path in find_at(newest).complete[0].rank_files("actor")] == [
        "actor_00000.safetensors", "actor_00001.safetensors",
    ]  # fmt: skip


def test_a_place_without_a_usable_checkpoint_says_what_is_wrong_with_each(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: there is no such folder; expected a run's folder"):
        find_at(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no complete checkpoint; expected a run's folder"):
        find_at(tmp_path)
    (write(CheckpointFolder(tmp_path, keep=2), 10) / "run.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_000010/run\.json: missing"):
        find_at(tmp_path)
    with pytest.raises(CheckpointError, match=r"run\.json: missing"):
        find_at(tmp_path / "step_000010")
