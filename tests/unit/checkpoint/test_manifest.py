"""Whatever happens to the files of a checkpoint is found, and named."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.checkpoint.folder import CheckpointFolder
from hybridrl.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    HashedFile,
    Manifest,
    damage_of,
    read_manifest,
    record_of,
    write_manifest,
)
from hybridrl.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import FILES, write

NAME = "actor_00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(CheckpointFolder(tmp_path, keep=3), 7)


def damages(folder: Path) -> list[str]:
    files = read_manifest(folder).files.items()
    return [d for name, record in files if (d := damage_of(folder, name, record, reads_content=True))]


def test_what_was_written_is_intact_and_the_sums_are_those_of_sha256sum(folder: Path) -> None:
    assert damages(folder) == []
    manifest = read_manifest(folder)
    assert manifest.step == 7 and manifest.files.keys() == FILES.keys()
    content = (folder / NAME).read_bytes()
    assert manifest.files[NAME].sha256 == hashlib.sha256(content).hexdigest()
    assert manifest.files[NAME] == record_of(folder / NAME)
    assert manifest.files[NAME].num_bytes == len(content)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[123] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_truncate, f"{NAME}: 591 bytes, expected 601"),
        (_flip, f"{NAME}: the SHA-256 sum is not that of the manifest"),
        (Path.unlink, f"{NAME}: missing"),
    ],
)
def test_a_truncated_changed_or_missing_file_is_named(folder: Path, harm: Callable[[Path], None], message: str) -> None:
    harm(folder / NAME)
    assert [damage.removeprefix(f"{folder}/") for damage in damages(folder)] == [message]


def test_sizes_alone_are_compared_without_reading(folder: Path) -> None:
    _flip(folder / NAME)
    assert damage_of(folder, NAME, read_manifest(folder).files[NAME], reads_content=False) is None


def test_an_archive_on_a_file_system_without_fsync_is_intact() -> None:
    place = Path("/proc/version")  # such a file system, which gives 0 for every size
    with place.open("rb") as file, pytest.raises(OSError, match="Invalid argument"):
        os.fsync(file.fileno())
    record = FileRecord(0, hashlib.sha256(place.read_bytes()).hexdigest())
    assert damage_of(place.parent, place.name, record, reads_content=True) is None


def _of_version_2(text: str) -> str:
    return json.dumps(json.loads(text) | {"version": 2})


def _of_another_step(text: str) -> str:
    return text.replace('"step": 7', '"step": 8')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_of_version_2, "hybridrl-checkpoint version 2, expected hybridrl-checkpoint version 1"),
        (lambda text: text.replace("hybridrl-checkpoint", "other"), "other version 1, expected"),
        (_of_another_step, r"damaged \(it is not what was written\)"),
        (lambda text: text[:-20], r"damaged \("),
        (lambda text: "[]", r"damaged \(it is not what was written\)"),
        (lambda text: text[:50] + "\udcff" + text[50:], r"damaged \("),
    ],
)
def test_a_foreign_or_changed_manifest_is_refused(folder: Path, change: Callable[[str], str], message: str) -> None:
    path = folder / MANIFEST
    path.write_text(change(path.read_text()), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}: {message}"):
        read_manifest(folder)


def test_without_a_manifest_there_is_no_checkpoint(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="missing, so the checkpoint was never completed"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b"])
def test_a_manifest_does_not_lead_out_of_its_folder(folder: Path, name: str) -> None:
    record = record_of(folder / NAME)
    (folder / name).parent.resolve().mkdir(exist_ok=True)
    manifest = json.loads((folder / MANIFEST).read_text())
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    body["files"] = {name: {"num_bytes": record.num_bytes, "sha256": record.sha256}}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(body | {"sha256": digest}))
    with pytest.raises(CheckpointError, match="expected one inside the folder"):
        read_manifest(folder)


def test_a_manifest_that_cannot_be_written_leaves_no_part_of_one(tmp_path: Path) -> None:
    file = HashedFile(tmp_path / "a")
    record = file.close()
    (tmp_path / MANIFEST).mkdir()  # nothing can be moved onto a folder
    with pytest.raises(OSError):
        write_manifest(tmp_path, Manifest(1, {"a": record}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", MANIFEST]
