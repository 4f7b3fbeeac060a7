"""Where the files of an HF checkpoint keep its weights: a shard map read from safetensors headers alone.

Source: the safetensors format: an 8-byte little-endian header length, a JSON header with dtype, shape and byte range of each
tensor, then the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.errors import LayoutError
from hybridrl.layout.box import Box, DType, contiguous_strides
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.shard import CanonicalTensor, LocalTensor, Place, Shard, ShardMap

# Float8 weights mean nothing without their scales, which nothing here reads.
_DTYPES = {dtype.value: dtype for dtype in DType if dtype is not DType.FLOAT8_E4M3}
_ALIGNMENT = 64
CHECKPOINT_PLACE = Place("checkpoint", 0, "file", "file")


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Where one tensor lies on disk.

    Attributes:
        offset_bytes: From the start of the file.
    """

    tensor: LocalTensor
    path: Path
    offset_bytes: int


def read_checkpoint_index(folder: Path) -> dict[str, FileTensor]:
    """Return every tensor of every ``*.safetensors`` file of a folder.

    Raises:
        LayoutError: When there is no file, a header is damaged or contradicts itself, a file is shorter than its header says, or
            a name occurs twice.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise LayoutError(f"{folder}: no *.safetensors files; expected a Hugging Face checkpoint folder")
    index: dict[str, FileTensor] = {}
    for path in paths:
        for entry in read_file(path)[0]:
            if entry.tensor.name in index:
                raise LayoutError(f"{path}: tensor {entry.tensor.name} is also in {index[entry.tensor.name].path}")
            index[entry.tensor.name] = entry
    return index


def read_file(path: Path) -> tuple[list[FileTensor], dict[str, str]]:
    """Return the tensors of one safetensors file, and its metadata.

    Raises:
        LayoutError: When the header is damaged or contradicts itself, or the file is shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= size - 8:
            raise LayoutError(
                f"{path}: damaged safetensors header (length {length}, file {size} bytes); copy the file again"
            )
        try:
            header = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as e:
            raise LayoutError(f"{path}: damaged safetensors header ({e}); copy the file again") from e
    if not isinstance(header, dict):
        got = type(header).__name__
        raise LayoutError(f"{path}: damaged safetensors header (got {got}, expected an object); copy the file again")
    items = {name: item for name, item in header.items() if name != "__metadata__"}
    tensors = [_file_tensor(path, name, item, 8 + length, size) for name, item in items.items()]
    return tensors, dict(header.get("__metadata__", {}))


def safetensors_header(tensors: Sequence[LocalTensor], metadata: Mapping[str, str]) -> bytes:
    """Return how a file begins in which these tensors lie one behind the other; the data starts at a multiple of 64 bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for tensor in tensors:
        stop = position + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype.value,
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _file_tensor(path: Path, name: str, item: object, data_start: int, file_bytes: int) -> FileTensor:
    """Return the tensor that an entry of a header describes.

    Args:
        data_start: Byte of the file at which the header ends.
    """
    match item:
        case {"dtype": str(code), "shape": [*extents], "data_offsets": [int(start), int(stop)]} if all(
            isinstance(extent, int) and extent >= 0 for extent in extents
        ):
            shape = tuple(extents)
        case _:
            expected = "an object with dtype, shape and data_offsets"
            raise LayoutError(
                f"{path}: tensor {name} is {item!r} in the header, expected {expected}; copy the file again"
            )
    if code not in _DTYPES:
        raise LayoutError(
            f"{path}: tensor {name} has dtype {code}, expected one of {', '.join(_DTYPES)}; convert it first"
        )
    tensor = LocalTensor(name, shape, _DTYPES[code])
    if start < 0 or stop - start != tensor.num_bytes:
        expected = f"{tensor.num_bytes} for shape {shape} of {code}"
        raise LayoutError(
            f"{path}: tensor {name} has {stop - start} bytes at data_offsets {start}..{stop}, expected {expected}; "
            "copy the file again"
        )
    if data_start + stop > file_bytes:
        raise LayoutError(
            f"{path}: truncated, tensor {name} ends at byte {data_start + stop} of {file_bytes}; copy the file again"
        )
    return FileTensor(tensor, path, data_start + start)


def checkpoint_shard_map(index: dict[str, FileTensor], spec: ModelSpec, where: str) -> ShardMap:
    """Return the shard map of checkpoint files; local tensors have canonical names.

    Raises:
        LayoutError: Listing tensors that are missing or have another shape than the model.
    """
    expected = spec.tensors()
    problems = [f"{name}: missing" for name in expected if name not in index]
    for name, tensor in expected.items():
        if name in index and index[name].tensor.shape != tensor.file_shape:
            problems.append(f"{name}: shape {index[name].tensor.shape}, expected {tensor.file_shape} from config.json")
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise LayoutError(f"{where}: {shown}")
    return whole_shard_map({name: index[name].tensor for name in expected}, CHECKPOINT_PLACE, expected)


def whole_shard_map(
    tensors: dict[str, LocalTensor], place: Place, canonical: Mapping[str, CanonicalTensor] | None = None
) -> ShardMap:
    """Return the map of a place that holds each canonical tensor whole, under its own name.

    Args:
        canonical: The model's tensors; by default those of `tensors` as they are.
    """
    whole = {name: canonical[name] if canonical else CanonicalTensor(name, t.shape) for name, t in tensors.items()}
    shards = tuple(Shard(name, Box.whole(t.shape), name, 0, contiguous_strides(t.shape)) for name, t in whole.items())
    return ShardMap(place, tensors, shards, whole)
