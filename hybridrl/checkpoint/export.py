"""A training checkpoint as a Hugging Face checkpoint, without a cluster: files to files, along a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybridrl.checkpoint.folder import MODEL, Checkpoint, find_at, none_usable
from hybridrl.checkpoint.manifest import damage_of
from hybridrl.checkpoint.state_file import Kind, StateFiles
from hybridrl.layout.box import DType
from hybridrl.layout.families import read_model_spec
from hybridrl.reshard.checkpoint import create_checkpoint, finish_checkpoint, write_checkpoint


def export(place: Path, output: Path, role: str, status: Callable[[str], None]) -> Checkpoint:
    """Write the weights of the newest intact checkpoint in the type in which the model computes; return that checkpoint.

    Args:
        place: A checkpoint, a folder of checkpoints, or a run's folder.
        output: A folder that does not exist yet.
        role: Whose weights.
        status: Told which checkpoints were skipped, and why.

    Raises:
        CheckpointError: Not one checkpoint is intact.
        ReshardError: `output` exists already.
    """
    found = find_at(place.absolute())
    damaged = list(found.damaged)
    for checkpoint in found.complete:
        damages = _damages(checkpoint)
        if not damages:
            _export(checkpoint, output, role)
            return checkpoint
        damaged += damages
        status(f"skipping a checkpoint: {damages[0]}")
    raise none_usable(place, damaged)


def _damages(checkpoint: Checkpoint) -> list[str]:
    files = checkpoint.manifest.files.items()
    found = (damage_of(checkpoint.folder, name, record, reads_content=True) for name, record in files)
    return [damage for damage in found if damage]


def _export(checkpoint: Checkpoint, output: Path, role: str) -> None:
    model = checkpoint.folder / MODEL
    spec = read_model_spec(model)
    files = StateFiles(checkpoint.rank_files(role), spec)
    create_checkpoint(output, spec, DType(files.facts[0]["dtype"]), model)
    write_checkpoint(output, spec, files.shard_maps(), None, files.views(Kind.PARAM))
    finish_checkpoint(output)
