"""Small complete checkpoints, with files of made-up content."""

from __future__ import annotations

from pathlib import Path

from hybridrl.checkpoint.folder import CheckpointFolder
from hybridrl.checkpoint.manifest import HashedFile

FILES = {"actor_00000.safetensors": b"rank 0" * 100, "actor_00001.safetensors": b"rank 1" * 100, "run.json": b"{}"}


def write(folder: CheckpointFolder, step: int) -> Path:
    """Write a complete checkpoint and return its folder."""
    path = folder.begin(step)
    records = {}
    for name, content in FILES.items():
        file = HashedFile(path / name)
        file.write(content + bytes([step % 256]))
        records[name] = file.close()
    folder.complete(step, records)
    return path
