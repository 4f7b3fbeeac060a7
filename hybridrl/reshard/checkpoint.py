"""Hugging Face checkpoints through the planner: each rank reads only its slices, and writes only its share.

Loading is a plan from the files to one rank. Saving is a plan from all ranks to the files, of which each rank carries out
its own moves straight into the mapped files; ranks that hold the same weights share the work evenly.

Saving has three steps, with a barrier of the caller's between them: :func:`create_checkpoint` on one rank,
:func:`write_checkpoint` on all, :func:`finish_checkpoint` on one. The folder appears under its own name, whole, in the last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.errors import ReshardError
from hybridrl.layout.box import DType
from hybridrl.layout.checkpoint import FileTensor, checkpoint_shard_map, read_checkpoint_index, safetensors_header
from hybridrl.layout.families import read_hf_config
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.shard import LocalTensor, ShardMap
from hybridrl.reshard import ops
from hybridrl.reshard.plan import Move
from hybridrl.reshard.planner import build_plan, plan_for_source
from hybridrl.reshard.room import take_room
from hybridrl.reshard.segments import Copy, copy_tables

_MAX_FILE_BYTES = 5 * 10**9
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".md")
_CONFIG_DTYPES = {DType.FLOAT32: "float32", DType.BFLOAT16: "bfloat16", DType.FLOAT16: "float16"}


def load_checkpoint(folder: Path, spec: ModelSpec, shard_map: ShardMap, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill one rank's tensors from a checkpoint, converting bf16 <-> fp32 where the types differ.

    Args:
        tensors: Local name -> contiguous tensor of `shard_map`.

    Raises:
        LayoutError: When the files are damaged or do not fit the model.
    """
    index = read_checkpoint_index(folder)
    files = checkpoint_shard_map(index, spec, str(folder))
    plan = build_plan([files], [shard_map])
    mapped = {path: np.memmap(path, mode="r") for path in {entry.path for entry in index.values()}}
    views = {name: file_view(entry, mapped) for name, entry in index.items()}
    copy_local(plan.moves, views, tensors)


def create_checkpoint(folder: Path, spec: ModelSpec, dtype: DType, copy_from: Path) -> None:
    """Create ``<folder>.partial`` with empty weight files of the right size, and the config and tokenizer of `copy_from`.

    The config's ``dtype`` becomes that of the weights, since loaders follow it, and a model that got a value head becomes one
    for token classification.

    Raises:
        ReshardError: When `folder` exists already, or there is no room for the weights; then nothing of them stays.
    """
    if folder.exists():
        raise ReshardError(f"{folder}: exists already; choose another folder for the export or remove it")
    partial = _partial(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy_companions(copy_from, partial)
    config = read_hf_config(copy_from)
    text = json.dumps(_exported_config(config, spec, dtype), indent=2) + "\n"
    (partial / "config.json").write_text(text, encoding="utf-8")
    files = _assign_files(spec, dtype)
    total = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    try:
        _check_room(partial, total)
        for name, tensors in files.items():
            _create_file(partial / name, tensors)
    except ReshardError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if len(files) > 1:
        weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def copy_companions(copy_from: Path, folder: Path) -> list[Path]:
    """Copy what an HF checkpoint has beside its weights, config and tokenizer; return the copies."""
    paths = [path for path in sorted(copy_from.iterdir()) if path.is_file() and path.suffix in _COMPANION_SUFFIXES]
    kept = [path for path in paths if not path.name.endswith(".index.json")]
    return [Path(shutil.copyfile(path, folder / path.name)) for path in kept]


def write_checkpoint(
    folder: Path, spec: ModelSpec, shard_maps: Sequence[ShardMap], rank: int | None, tensors: Mapping[str, ops.Buffer]
) -> None:
    """Write one rank's share into the files that :func:`create_checkpoint` made.

    Args:
        shard_maps: Of every rank that holds the model, the same on each.
        rank: Index of this rank in `shard_maps`; None writes the shares of all, whose local names all differ.
        tensors: Local name -> contiguous tensor, of the ranks that write.
    """
    index = read_checkpoint_index(_partial(folder))
    files = checkpoint_shard_map(index, spec, str(folder))
    plan = build_plan(shard_maps, [files]) if rank is None else plan_for_source(shard_maps, [files], rank)
    own = list(plan.moves)
    paths = {index[move.tensor].path for move in own}
    mapped = {path: np.memmap(path, mode="r+") for path in paths}
    views = {move.tensor: file_view(index[move.tensor], mapped) for move in own}
    copy_local(own, tensors, views)
    for file in mapped.values():
        file.flush()


def finish_checkpoint(folder: Path) -> None:
    """Give the finished checkpoint its name."""
    _partial(folder).rename(folder)


def _exported_config(config: dict[str, Any], spec: ModelSpec, dtype: DType) -> dict[str, Any]:
    exported = {name: value for name, value in config.items() if name != "torch_dtype"} | {
        "dtype": _CONFIG_DTYPES[dtype]
    }
    if spec.value_head:
        labels = [f"LABEL_{label}" for label in range(spec.value_head.num_labels)]
        exported.setdefault("id2label", {str(label): name for label, name in enumerate(labels)})
        exported.setdefault("label2id", {name: label for label, name in enumerate(labels)})
        architectures = config.get("architectures") or []
        exported["architectures"] = [name.replace("ForCausalLM", "ForTokenClassification") for name in architectures]
    return exported


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _assign_files(spec: ModelSpec, dtype: DType) -> dict[str, list[LocalTensor]]:
    groups: list[list[LocalTensor]] = [[]]
    size = 0
    for name, canonical in spec.tensors().items():
        tensor = LocalTensor(name, canonical.file_shape, canonical.dtype or dtype)
        if groups[-1] and size + tensor.num_bytes > _MAX_FILE_BYTES:
            groups.append([])
            size = 0
        size += tensor.num_bytes
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ReshardError(
            f"{folder}: no room for {num_bytes} bytes, {free} are free; free some, or export into another folder"
        )


def _create_file(path: Path, tensors: list[LocalTensor]) -> None:
    """Make a file that has all its room: a mapped page for which the disk has none would end the process with SIGBUS."""
    header = safetensors_header(tensors, {"format": "pt"})
    size = len(header) + sum(tensor.num_bytes for tensor in tensors)
    with path.open("wb") as file:
        try:
            take_room(file.fileno(), size)
            file.write(header)
        except OSError as e:
            raise ReshardError(
                f"{path}: no room for its {size} bytes ({e.strerror}); free some, or export into another folder"
            ) from e


def file_view(entry: FileTensor, mapped: Mapping[Path, ops.Bytes]) -> ops.Bytes:
    """Return the bytes of a tensor in a mapped file."""
    return mapped[entry.path][entry.offset_bytes : entry.offset_bytes + entry.tensor.num_bytes]


def copy_local(
    moves: Sequence[Move], sources: Mapping[str, ops.Buffer], destinations: Mapping[str, ops.Buffer]
) -> None:
    """Carry out moves whose two sides are in this process's memory."""
    read = {name: i for i, name in enumerate(dict.fromkeys(move.read.local for move in moves))}
    write = {name: i for i, name in enumerate(dict.fromkeys(move.write.local for move in moves))}
    copies = [(m.tensor, Copy(m.box.shape, read[m.read.local], m.read, write[m.write.local], m.write)) for m in moves]
    source_table = ops.buffer_table([sources[name] for name in read])
    destination_table = ops.buffer_table([destinations[name] for name in write])
    for cast, table in copy_tables(copies):
        ops.segmented_copy(table, source_table, destination_table, cast=cast)
