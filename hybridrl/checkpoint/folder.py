"""The folder of a run's checkpoints: ``step_000010/``, ``step_000020/``, ...

    begin(step)  an empty folder, without a manifest      complete(step)  the manifest, then older ones beyond `keep` go

Invariants: what is listed as complete has a manifest and every file in its size; a folder that goes, or is written anew, loses its
manifest first, so no moment has a manifest over a part of the files.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.checkpoint.manifest import MANIFEST, FileRecord, Manifest, damage_of, read_manifest, write_manifest
from hybridrl.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run's folder, unless the configuration names another."""
MODEL = "model"
"""Folder in a checkpoint with the config and the tokenizer of the model."""
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint; its files have the right sizes, and their content is as yet unread."""

    folder: Path
    manifest: Manifest

    def rank_files(self, role: str) -> list[Path]:
        """Return the training state of each rank of a role, in rank order."""
        return [self.folder / name for name in sorted(self.manifest.files) if name.startswith(f"{role}_")]


def rank_file(role: str, rank: int) -> str:
    """Return the name of a rank's training state inside a checkpoint."""
    return f"{role}_{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoints of a folder.

    Attributes:
        complete: Newest first.
        unfinished: Folders without a manifest: saves that did not end.
        damaged: What is wrong with each of the others, newest first.
    """

    complete: tuple[Checkpoint, ...]
    unfinished: tuple[Path, ...]
    damaged: tuple[str, ...]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder.

    Raises:
        CheckpointError: It is not complete; names the file.
    """
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        if damage := damage_of(folder, name, record, reads_content=False):
            raise CheckpointError(damage)
    return Checkpoint(folder, manifest)


def find_checkpoints(root: Path) -> Found:
    """Look through a folder of checkpoints, which need not exist."""
    complete, unfinished, damaged = [], [], []
    for folder in sorted(_folders(root), key=_step_of, reverse=True):
        if not (folder / MANIFEST).exists():
            unfinished.append(folder)
            continue
        try:
            complete.append(open_checkpoint(folder))
        except CheckpointError as e:
            damaged.append(str(e))
    return Found(tuple(complete), tuple(unfinished), tuple(damaged))


def find_at(place: Path) -> Found:
    """Look at a checkpoint, a folder of checkpoints, or a run's folder.

    Raises:
        CheckpointError: Nothing in it is complete.
    """
    if (place / MANIFEST).exists():
        return Found((open_checkpoint(place),), (), ())
    found = find_checkpoints(place / CHECKPOINTS if (place / CHECKPOINTS).is_dir() else place)
    if not found.complete:
        raise none_usable(place, found.damaged)
    return found


def none_usable(place: Path, damaged: Sequence[str]) -> CheckpointError:
    """Return the error that says that there is nothing to go on from, and what is wrong with what there is."""
    if not damaged:
        found = "has no complete checkpoint" if place.is_dir() else "there is no such folder"
        return CheckpointError(
            f"{place}: {found}; expected a run's folder, a checkpoints folder or one of its step_* folders"
        )
    return CheckpointError("\n  ".join([f"{place}: not one checkpoint is complete and as it was written", *damaged]))


class CheckpointFolder:
    """Writes checkpoints of one run and lets old ones go.

    Args:
        root: Made when the first checkpoint is.
        keep: Newest complete checkpoints that stay.
        resumed: The checkpoint that this run went on from, which stays as well.
    """

    def __init__(self, root: Path, keep: int, resumed: Path | None = None) -> None:
        self._root = root.resolve()
        self._keep = keep
        self._resumed = resumed.resolve() if resumed else None

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step goes."""
        return self._root / f"step_{step:06d}"

    def begin(self, step: int) -> Path:
        """Return an empty folder for the files of a step."""
        folder = self.path(step)
        _remove(folder)
        folder.mkdir(parents=True)
        return folder

    def complete(self, step: int, files: Mapping[str, FileRecord]) -> None:
        """Declare a step's checkpoint complete, and remove older ones beyond `keep`; unfinished and damaged ones do not count."""
        write_manifest(self.path(step), Manifest(step, files))
        usable = [each.folder for each in find_checkpoints(self._root).complete if _step_of(each.folder) < step]
        kept = {*usable[: self._keep - 1], self._resumed}
        for each in _folders(self._root):
            if _step_of(each) < step and each not in kept:
                with contextlib.suppress(OSError):  # then it goes next time
                    _remove(each)

    def discard(self, step: int) -> None:
        """Remove what there is of a step that could not be saved, as far as the storage lets us."""
        with contextlib.suppress(OSError):
            _remove(self.path(step))


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []


def _step_of(folder: Path) -> int:
    found = _NAME.fullmatch(folder.name)
    assert found, folder
    return int(found[1])


def _remove(folder: Path) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
