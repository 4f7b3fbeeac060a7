"""The training state of each rank as a safetensors file, and loading it into ranks of any layout.

A rank writes what its optimizer holds as it lies in memory: main parameters and both moments, flat ranges of its local tensors
(``layout/flat.py``), and beside them the buffers of the model. The header's metadata has the rank's shard map, which says what
boxes of canonical tensors these bytes are. So saving is one sequential write without any communication, and loading is a plan
(``reshard/planner.py``) from the files to one rank, whatever the layouts of both: each rank reads only its slices.

Worked example: ``exp_avg/0.decoder.layers.0.mlp.linear_fc2.weight`` of 18 elements, in a file whose map puts box [1:2, 2:8] of
``model.layers.0.mlp.down_proj.weight`` at its element 0.

The names of tensors begin with their kind. ``param`` holds every element of the model, so it is also what is exported.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.checkpoint.manifest import FileRecord, HashedFile
from hybridrl.errors import CheckpointError
from hybridrl.layout.box import Box
from hybridrl.layout.checkpoint import CHECKPOINT_PLACE, FileTensor, read_file, safetensors_header
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.shard import Shard, ShardMap
from hybridrl.reshard.checkpoint import copy_local, file_view
from hybridrl.reshard.planner import build_plan


class Kind(enum.Enum):
    """What a tensor is of a parameter; the value begins its name."""

    PARAM = "param"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank writes.

    Attributes:
        shard_map: Of the tensors of kind PARAM; those of the other kinds are some of the same, in the same shape and type.
        tensors: Kind -> local name -> contiguous tensor in host memory.
        facts: What else is to be known, as JSON.
    """

    shard_map: ShardMap
    tensors: Mapping[Kind, Mapping[str, torch.Tensor]]
    facts: Mapping[str, Any]


def write_rank_state(path: Path, state: RankState) -> FileRecord:
    """Write a new file and put it on disk."""
    names = {
        f"{kind.value}/{name}": (name, of_kind[name]) for kind, of_kind in state.tensors.items() for name in of_kind
    }
    described = [replace(state.shard_map.tensors[name], name=full) for full, (name, _) in names.items()]
    shards = [(s.tensor, s.box.start, s.box.stop, s.local, s.offset, s.strides) for s in state.shard_map.shards]
    file = HashedFile(path)
    file.write(safetensors_header(described, {"shards": json.dumps(shards), "facts": json.dumps(state.facts)}))
    for _, tensor in names.values():
        file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return file.close()


class StateFiles:
    """The files of all ranks of a checkpoint.

    Args:
        paths: One per rank that wrote.
        spec: The model.

    Raises:
        LayoutError: A file is damaged.
        CheckpointError: The files are of another model.
    """

    def __init__(self, paths: Sequence[Path], spec: ModelSpec) -> None:
        self._canonical = spec.tensors()
        self._family = spec.family
        self._ranks = [_RankFile.read(path) for path in paths]

    @property
    def facts(self) -> list[dict[str, Any]]:
        """What each rank had to say, in the order of the files."""
        return [rank.facts for rank in self._ranks]

    def shard_maps(self) -> list[ShardMap]:
        """Return where each file keeps the tensors of kind PARAM, and those of the others; local names begin with its number."""
        return [self._shard_map(number, rank) for number, rank in enumerate(self._ranks)]

    def views(self, kind: Kind) -> dict[str, np.ndarray[Any, Any]]:
        """Return the bytes of the tensors of a kind by local name, mapped from the files."""
        return {
            _numbered(number, name): file_view(entry, self._mapped)
            for number, rank in enumerate(self._ranks)
            for name, entry in rank.of_kind(kind).items()
        }

    def load(self, shard_map: ShardMap, tensors: Mapping[Kind, Mapping[str, torch.Tensor]]) -> None:
        """Fill one rank's tensors, rounding float32 to bfloat16 where they have that type.

        Args:
            tensors: Kind -> local name -> contiguous tensor of `shard_map`, on any device.

        Raises:
            ReshardError: The files lack an element, or hold a tensor in another shape; names it.
        """
        plan = build_plan(self.shard_maps(), [shard_map])
        for kind, of_kind in tensors.items():
            host = {name: tensor.cpu() for name, tensor in of_kind.items()}
            copy_local(plan.moves, self.views(kind), host)
            for name, tensor in of_kind.items():
                if host[name] is not tensor:
                    tensor.copy_(host[name])

    @cached_property
    def _mapped(self) -> dict[Path, np.ndarray[Any, Any]]:
        return {rank.path: np.memmap(rank.path, mode="r") for rank in self._ranks}

    def _shard_map(self, number: int, rank: _RankFile) -> ShardMap:
        held = rank.of_kind(Kind.PARAM)
        tensors = {_numbered(number, name): entry.tensor for name, entry in held.items()}
        shards = tuple(replace(s, local=_numbered(number, s.local)) for s in rank.shards)
        unknown = sorted({shard.tensor for shard in shards} - self._canonical.keys())
        if unknown:
            raise CheckpointError(
                f"{rank.path}: holds {unknown[0]}, which {self._family} does not have; resume with the model of that run"
            )
        canonical = {shard.tensor: self._canonical[shard.tensor] for shard in shards}
        place = replace(CHECKPOINT_PLACE, rank=number, device=rank.path.name)
        return ShardMap(place, tensors, shards, canonical)


@dataclass(frozen=True, slots=True)
class _RankFile:
    path: Path
    entries: Mapping[str, FileTensor]
    shards: tuple[Shard, ...]
    facts: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _RankFile:
        entries, metadata = read_file(path)
        try:
            rows, facts = json.loads(metadata["shards"]), json.loads(metadata["facts"])
        except (KeyError, ValueError) as e:
            raise CheckpointError(f"{path}: not the training state of a rank ({e!r})") from e
        shards = tuple(
            Shard(tensor, Box(tuple(start), tuple(stop)), local, offset, tuple(strides))
            for tensor, start, stop, local, offset, strides in rows
        )
        return cls(path, {entry.tensor.name: entry for entry in entries}, shards, facts)

    def of_kind(self, kind: Kind) -> dict[str, FileTensor]:
        """Return the tensors of a kind by local name."""
        prefix = f"{kind.value}/"
        return {name.removeprefix(prefix): each for name, each in self.entries.items() if name.startswith(prefix)}


def _numbered(number: int, name: str) -> str:
    return f"{number}:{name}"
