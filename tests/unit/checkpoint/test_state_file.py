"""Training states go through files from any layout into any other, and out as a Hugging Face checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hybridrl.checkpoint.export import export
from hybridrl.checkpoint.folder import MODEL, CheckpointFolder, rank_file
from hybridrl.checkpoint.manifest import record_of
from hybridrl.checkpoint.state_file import Kind, RankState, StateFiles, write_rank_state
from hybridrl.errors import CheckpointError, LayoutError, ReshardError
from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.flat import flat_shard_map
from hybridrl.layout.megatron import MegatronLayout, megatron_shard_map
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import Place, ShardMap
from tests.unit.layout.models import FAMILIES, QWEN3_MOE, fill_local, random_canonical

SPEC = model_spec(QWEN3_MOE)
VALUES = {
    kind: {name: values * (number + 1) for name, values in random_canonical(SPEC).items()}
    for number, kind in enumerate(Kind)
}


def rank_map(sizes: ParallelSizes, rank: int, dtype: DType = DType.FLOAT32) -> ShardMap:
    return megatron_shard_map(MegatronLayout(SPEC, sizes, dtype), Place("actor", rank, "node", f"cpu:{rank}"))


def held_by(shard_map: ShardMap, part: int, num_parts: int) -> ShardMap:
    """Return what one of `num_parts` data-parallel ranks holds, cut at places that no row ends at."""
    ranges = {}
    for name, tensor in shard_map.tensors.items():
        size = int(np.prod(tensor.shape))
        edges = [0, *(size * i // num_parts + 1 for i in range(1, num_parts)), size]
        ranges[name] = range(edges[part], edges[part + 1])
    return flat_shard_map(shard_map, ranges, DType.FLOAT32)


def filled(shard_map: ShardMap, kind: Kind) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in fill_local(shard_map, VALUES[kind]).items()}


def write_world(folder: Path, sizes: ParallelSizes) -> list[Path]:
    paths = []
    for rank in range(sizes.world_size):
        held = held_by(rank_map(sizes, rank), sizes.coordinates(rank).dp, sizes.dp)
        state = RankState(held, {kind: filled(held, kind) for kind in Kind}, {"dtype": "BF16", "rank": rank})
        paths.append(folder / rank_file("actor", rank))
        write_rank_state(paths[-1], state)
    return paths


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_world(tmp_path_factory.mktemp("world"), ParallelSizes(tp=2, pp=2, ep=2, dp=2))


@pytest.mark.parametrize("kind", Kind)
def test_every_rank_of_another_layout_gets_its_elements_to_the_bit(paths: list[Path], kind: Kind) -> None:
    files = StateFiles(paths, SPEC)
    sizes = ParallelSizes(tp=1, pp=1, ep=4, dp=4)
    for rank in range(sizes.world_size):
        held = held_by(rank_map(sizes, rank), sizes.coordinates(rank).dp, sizes.dp)
        tensors = {name: torch.full(t.shape, torch.nan) for name, t in held.tensors.items()}
        files.load(held, {kind: tensors})
        expected = filled(held, kind)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert [facts["rank"] for facts in files.facts] == list(range(8))


def test_parameters_of_bfloat16_are_the_main_parameters_rounded(paths: list[Path]) -> None:
    shard_map = rank_map(ParallelSizes(tp=2), 1, DType.BFLOAT16)
    tensors = {name: torch.zeros(t.shape, dtype=torch.bfloat16) for name, t in shard_map.tensors.items()}
    StateFiles(paths, SPEC).load(shard_map, {Kind.PARAM: tensors})
    expected = filled(rank_map(ParallelSizes(tp=2), 1), Kind.PARAM)
    assert all(torch.equal(tensors[name], expected[name].bfloat16()) for name in expected)


def test_other_programs_can_read_the_files(paths: list[Path]) -> None:
    with safe_open(paths[0], "pt") as file:
        names = set(file.keys())
        shards = json.loads(file.metadata()["shards"])
        tensor, start, stop, local, offset, _ = shards[0]
        box = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
        expected = torch.from_numpy(VALUES[Kind.EXP_AVG][tensor][box]).reshape(-1)
        got = file.get_tensor(f"exp_avg/{local}")[offset : offset + expected.numel()]
    assert len(names) == 3 * len({shard[3] for shard in shards})
    assert torch.equal(got, expected)  # the first shard is whole rows


def test_a_missing_rank_is_noticed_and_the_tensor_named(paths: list[Path]) -> None:
    held = rank_map(ParallelSizes(), 0)
    tensors = {name: torch.zeros(t.shape) for name, t in held.tensors.items()}
    with pytest.raises(ReshardError, match="no source holds it"):
        StateFiles(paths[:-1], SPEC).load(held, {Kind.EXP_AVG: tensors})


def test_the_state_of_another_model_is_refused(paths: list[Path]) -> None:
    other = model_spec(FAMILIES["qwen3"])
    with pytest.raises(CheckpointError, match=r"which qwen3 does not have; resume with the model of that run"):
        StateFiles(paths, other).shard_maps()


def test_a_damaged_file_and_one_of_another_kind_are_refused(tmp_path: Path, paths: list[Path]) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(paths[0].read_bytes()[:-8])
    with pytest.raises(LayoutError, match=r"cut.safetensors: truncated"):
        StateFiles([cut], SPEC)
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="not the training state of a rank"):
        StateFiles([tmp_path / "other.safetensors"], SPEC)


def checkpoint(root: Path, step: int) -> Path:
    folder = CheckpointFolder(root, keep=5)
    path = folder.begin(step)
    (path / MODEL).mkdir()
    (path / MODEL / "config.json").write_text(json.dumps(QWEN3_MOE))
    written = [*write_world(path, ParallelSizes(tp=2, dp=2)), path / MODEL / "config.json"]
    folder.complete(step, {str(each.relative_to(path)): record_of(each) for each in written})
    return path


def test_an_export_has_every_tensor_whole_in_the_type_of_the_model(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run" / "checkpoints", 10)
    damaged = checkpoint(tmp_path / "run" / "checkpoints", 20) / rank_file("actor", 2)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    said: list[str] = []
    taken = export(tmp_path / "run", tmp_path / "hf", "actor", said.append)
    assert taken.manifest.step == 10
    assert said == [f"skipping a checkpoint: {damaged}: the SHA-256 sum is not that of the manifest"]
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == SPEC.tensors().keys()
    for name, values in VALUES[Kind.PARAM].items():
        assert torch.equal(exported[name], torch.from_numpy(values).bfloat16()), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(ReshardError, match="exists already"):
        export(tmp_path / "run", tmp_path / "hf", "actor", said.append)
