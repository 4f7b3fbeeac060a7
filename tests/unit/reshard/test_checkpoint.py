"""HF checkpoints: round trips are bit-identical, each rank reads only its slices, damage is named."""

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrl.errors import LayoutError, ReshardError
from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.reshard.checkpoint import create_checkpoint, finish_checkpoint, load_checkpoint, write_checkpoint
from tests.unit.layout.models import FAMILIES, QWEN3_MOE, random_canonical
from tests.unit.reshard.test_planner import SPEC, world
from tests.unit.reshard.world import empty_tensors, filled_tensors

CANONICAL = random_canonical(SPEC)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "hf"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(QWEN3_MOE))
    save_file({name: torch.from_numpy(values) for name, values in CANONICAL.items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    "sizes", [ParallelSizes(), ParallelSizes(tp=2, pp=2, ep=2), ParallelSizes(tp=2, dp=2, ep=2, etp=2)], ids=str
)
def test_import_then_export_is_bit_identical(folder, tmp_path, sizes):
    maps = world(sizes, "actor")
    ranks = [empty_tensors(m) for m in maps]
    for shard_map, tensors in zip(maps, ranks, strict=True):
        load_checkpoint(folder, SPEC, shard_map, tensors)
        want = filled_tensors(shard_map, CANONICAL)
        assert all(torch.equal(tensors[name], want[name]) for name in want)
    target = tmp_path / "export"
    create_checkpoint(target, SPEC, DType.FLOAT32, folder)
    for rank, tensors in enumerate(ranks):
        write_checkpoint(target, SPEC, maps, rank, tensors)
    assert not target.exists()
    finish_checkpoint(target)
    exported = load_file(target / "model.safetensors")
    assert exported.keys() == CANONICAL.keys()
    assert all(torch.equal(exported[name], torch.from_numpy(values)) for name, values in CANONICAL.items())
    assert json.loads((target / "config.json").read_text()) == QWEN3_MOE | {"dtype": "float32"}


def test_bfloat16_files_fill_float32_ranks_exactly(folder):
    halves = {name: torch.from_numpy(values).bfloat16() for name, values in CANONICAL.items()}
    save_file(halves, folder / "model.safetensors")
    shard_map = world(ParallelSizes(), "actor")[0]
    tensors = empty_tensors(shard_map)
    load_checkpoint(folder, SPEC, shard_map, tensors)
    assert torch.equal(tensors["0.output_layer.weight"], halves["lm_head.weight"].float())


def test_existing_folder_is_not_overwritten(folder):
    with pytest.raises(ReshardError, match="exists already"):
        create_checkpoint(folder, SPEC, DType.FLOAT32, folder)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A limit at which this process meets the same error as at a full disk, under another number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_room_of_an_export_is_taken_before_its_mapped_pages_are_written(folder, tmp_path):
    create_checkpoint(tmp_path / "export", SPEC, DType.FLOAT32, folder)
    made = (tmp_path / "export.partial" / "model.safetensors").stat()
    assert made.st_size > sum(values.nbytes for values in CANONICAL.values())
    assert made.st_blocks * 512 >= made.st_size, "sparse"


def test_an_export_without_room_names_file_and_bytes_and_leaves_nothing(folder, tmp_path):
    message = r"export.partial/model.safetensors: no room for its \d{6} bytes \(File too large\); free some"
    with pytest.raises(ReshardError, match=message), files_of_at_most(100_000):
        create_checkpoint(tmp_path / "export", SPEC, DType.FLOAT32, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_export_that_is_larger_than_what_is_free_is_refused_as_a_whole(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    message = r"export.partial: no room for \d{6} bytes, 1000 are free"
    with pytest.raises(ReshardError, match=message):
        create_checkpoint(tmp_path / "export", SPEC, DType.FLOAT32, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_missing_and_misshapen_tensors_are_listed(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:50].clone()
    save_file(tensors, folder / "model.safetensors")
    shard_map = world(ParallelSizes(), "actor")[0]
    with pytest.raises(
        LayoutError, match=r"model.norm.weight: missing; lm_head.weight: shape \(50, 32\), expected \(100, 32\)"
    ):
        load_checkpoint(folder, SPEC, shard_map, empty_tensors(shard_map))


def test_truncated_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    shard_map = world(ParallelSizes(), "actor")[0]
    with pytest.raises(LayoutError, match=r"model.safetensors: truncated, tensor .* ends at byte"):
        load_checkpoint(folder, SPEC, shard_map, empty_tensors(shard_map))
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(LayoutError, match=r"damaged safetensors header"):
        load_checkpoint(folder, SPEC, shard_map, empty_tensors(shard_map))
    path.unlink()
    with pytest.raises(LayoutError, match=r"no \*.safetensors files"):
        load_checkpoint(folder, SPEC, shard_map, empty_tensors(shard_map))


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_exports_keep_the_shapes_of_files_and_the_types_of_float32_tensors(tmp_path, family):
    spec = model_spec(FAMILIES[family])
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(FAMILIES[family]))
    create_checkpoint(tmp_path / "export", spec, DType.BFLOAT16, source)
    finish_checkpoint(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == {
        name: tensor.file_shape for name, tensor in spec.tensors().items()
    }
    kept = {name for name, tensor in exported.items() if tensor.dtype is torch.float32}
    assert kept == {name for name in exported if name.endswith("e_score_correction_bias")}
