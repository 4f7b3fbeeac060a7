"""The manifest of a checkpoint: which files belong to it, with their sizes and SHA-256 sums.

It is written last, after every file is on disk, and appears in one rename. So a folder with a manifest was once complete, a
folder without one never was, and what happened to it since shows in the sums. The manifest carries its own sum as well.

``sha256sum`` finds the same sums, and JSON is all that there is to read: nothing in a checkpoint is code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from hybridrl.errors import CheckpointError
from hybridrl.observability.files import replaced

MANIFEST = "manifest.json"
_FORMAT = "hybridrl-checkpoint"
_VERSION = 1
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file was when it was written."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a checkpoint consists of.

    Attributes:
        step: Steps that the run had taken, which is the policy version.
        files: By name relative to the folder, with forward slashes.
    """

    step: int
    files: Mapping[str, FileRecord]


class HashedFile:
    """A new file that knows its record; on disk once :meth:`close` has returned."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        for start in range(0, len(data), _BLOCK_BYTES):
            block = data[start : start + _BLOCK_BYTES]
            self._file.write(block)
            self._digest.update(block)

    def close(self) -> FileRecord:
        """Put the file on disk."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            return FileRecord(self._file.tell(), self._digest.hexdigest())


def record_of(path: Path) -> FileRecord:
    """Put a file that was just written on disk, and return its record."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileRecord(path.stat().st_size, _sha256(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Declare a checkpoint complete; its files are on disk already."""
    for each in {(folder / name).parent for name in manifest.files} | {folder, folder.parent}:
        _sync_folder(each)
    body = {
        "format": _FORMAT,
        "version": _VERSION,
        "step": manifest.step,
        "files": {name: asdict(record) for name, record in sorted(manifest.files.items())},
    }
    with replaced(folder / MANIFEST) as temporary, temporary.open("w", encoding="utf-8") as file:
        json.dump(body | {"sha256": _sum_of(body)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """Read what a checkpoint consists of.

    Raises:
        CheckpointError: There is no manifest, or it is damaged or of another version.
    """
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing, so the checkpoint was never completed") from None
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: damaged ({e})") from e
    match body:
        case {"format": str(kind), "version": int(version)} if (kind, version) != (_FORMAT, _VERSION):
            raise CheckpointError(f"{path}: {kind} version {version}, expected {_FORMAT} version {_VERSION}")
        case {"sha256": str(expected), "step": int(step), "files": dict(files)}:
            if _sum_of({name: value for name, value in body.items() if name != "sha256"}) == expected:
                return Manifest(step, {_checked(path, name): FileRecord(**record) for name, record in files.items()})
    raise CheckpointError(f"{path}: damaged (it is not what was written)")


def damage_of(folder: Path, name: str, record: FileRecord, *, reads_content: bool) -> str | None:
    """Return what is wrong with a file of a checkpoint; None when it is as it was written.

    Args:
        reads_content: Whether to compare checksums too, not only sizes.
    """
    path = folder / name
    try:
        size = path.stat().st_size
        if size != record.num_bytes:
            return f"{path}: {size} bytes, expected {record.num_bytes}"
        if reads_content and _sha256(path) != record.sha256:
            return f"{path}: the SHA-256 sum is not that of the manifest"
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as e:
        return f"{path}: cannot be read ({e})"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sum_of(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _checked(path: Path, name: str) -> str:
    """Refuse a name that leads out of the folder."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise CheckpointError(f"{path}: names the file {name!r}, expected one inside the folder")
    return name


def _sync_folder(folder: Path) -> None:
    """Put the names of a folder's files on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
