"""One rank of the proof that a planned update equals vLLM's own load: learns, receives by the plan, compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.linear import LinearBase

from hybridrl.engines.vllm.install import ModuleSink
from hybridrl.engines.vllm.learn import LearnedLayout, learn_layout
from hybridrl.layout.box import DType
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.megatron import MegatronLayout, megatron_shard_map
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.shard import Place, ShardMap
from hybridrl.layout.vllm import VllmLayout, vllm_shard_map
from hybridrl.reshard import ops
from hybridrl.reshard.plan import Move, Plan
from hybridrl.reshard.planner import plan_for_destination
from hybridrl.reshard.segments import Copy, copy_tables
from tests.e2e import vllm_models
from tests.e2e.vllm_models import Replica

TORCH = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}
Tensors = dict[str, torch.Tensor]
_CHUNK_BYTES = 4096  # cuts modules and tensors over several chunks


def check(
    rank: int, checkpoints: tuple[Path, Path], layout: Replica, sources: Mapping[str, MegatronLayout]
) -> list[str]:
    """Compare the declared map with the learned one, and an update from every source layout with a fresh load.

    The model begins with the first checkpoint; updates give it the second, the first, and so on in turn.

    Returns:
        What differs, in words.
    """
    spec, place = read_model_spec(checkpoints[0]), Place("rollout", rank, "node", f"rollout-{rank}")
    with vllm_models.replica(checkpoints[0], layout) as config:
        fresh = [_Fresh.load(folder, config) for folder in checkpoints]
        model = vllm_models.build(config)
        vllm_models.load(model, checkpoints[0])
        vllm_models.process(model, config)
        learned = learn_layout(model, spec.tensors(), torch.bfloat16, place)
        problems = _compare_maps(_declared(spec, layout, place), learned.shard_map)
        maps = [learned.shard_map] * vllm_models.WORLD_SIZE
        torch.distributed.all_gather_object(maps, learned.shard_map)
        for index, (source, megatron) in enumerate(sources.items(), 1):
            turn = index % 2
            ranks = _source_ranks(megatron, _read_canonical(checkpoints[turn], spec))
            plan = plan_for_destination([own for own, _ in ranks], maps, rank, chunk_bytes=_CHUNK_BYTES)
            problems += [
                f"from {source}: {p}" for p in _update(model, learned, plan, [t for _, t in ranks], fresh[turn])
            ]
    return problems


@dataclass(frozen=True, slots=True)
class _Fresh:
    """A model that vLLM loaded: as loaded, in load format, and as the kernels use it."""

    model: nn.Module
    loaded: Tensors

    @classmethod
    def load(cls, folder: Path, config: VllmConfig) -> _Fresh:
        model = vllm_models.build(config)
        vllm_models.load(model, folder)
        loaded = {name: tensor.clone() for name, tensor in vllm_models.state(model).items()}
        vllm_models.process(model, config)
        return cls(model, loaded)


def _declared(spec: ModelSpec, layout: Replica, place: Place) -> ShardMap:
    declared = VllmLayout(spec, layout.tp, DType.BFLOAT16, layout.has_expert_parallel, layout.pp)
    return vllm_shard_map(declared, vllm_models.tp_rank(), place, pp_rank=get_pp_group().rank_in_group)


def _compare_maps(declared: ShardMap, learned: ShardMap) -> list[str]:
    """Name what differs: names, shapes and types in order, shards, padding, canonical tensors."""
    problems = []
    if list(declared.tensors) != list(learned.tensors):
        problems.append(f"names: declared {list(declared.tensors)}, learned {list(learned.tensors)}")
    problems += [
        f"declared {tensor}, learned {learned.tensors.get(name)}"
        for name, tensor in declared.tensors.items()
        if learned.tensors.get(name) != tensor
    ]
    if other := set(declared.shards) ^ set(learned.shards):
        problems.append(f"shards: {sorted(map(str, other))[:4]}")
    for field in ("padding", "canonical"):
        if dict(getattr(declared, field)) != dict(getattr(learned, field)):
            problems.append(f"{field}: declared {getattr(declared, field)}, learned {getattr(learned, field)}")
    return problems


def _read_canonical(folder: Path, spec: ModelSpec) -> Tensors:
    files: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        files |= load_file(path)
    return {name: files[name].reshape(tensor.shape) for name, tensor in spec.tensors().items()}


def _source_ranks(layout: MegatronLayout, canonical: Tensors) -> list[tuple[ShardMap, Tensors]]:
    """Return map and tensors of every Megatron rank; what no shard fills is NaN."""
    ranks = []
    for rank in range(layout.sizes.world_size):
        own = megatron_shard_map(layout, Place("actor", rank, "node", f"actor-{rank}"))
        ranks.append((own, megatron_tensors(own, canonical)))
    return ranks


def megatron_tensors(own: ShardMap, canonical: Tensors) -> Tensors:
    """Cut a rank's tensors from the canonical ones."""
    tensors = {name: torch.full(t.shape, torch.nan, dtype=TORCH[t.dtype]) for name, t in own.tensors.items()}
    for shard in own.shards:
        part = canonical[shard.tensor][tuple(map(slice, shard.box.start, shard.box.stop))]
        tensors[shard.local].as_strided(shard.box.shape, shard.strides, shard.offset).copy_(part)
    return tensors


def _update(model: nn.Module, learned: LearnedLayout, plan: Plan, have: Sequence[Tensors], fresh: _Fresh) -> list[str]:
    """Carry a plan out into a live model, as a worker does, and compare it with a fresh load."""
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    sink, problems = ModuleSink(model, learned, torch.bfloat16), []
    moves = {chunk: list(group) for chunk, group in groupby(plan.moves, key=lambda move: move.chunk)}
    with torch.no_grad():
        for chunk in next(chunks for chunks in plan.chunks if chunks):
            targets = sink.open(chunk)
            _copy(moves.get(chunk.index, []), have, targets)
            problems += [
                f"{local} in load format"
                for local in chunk.completed
                if not _is_equal(targets[local], fresh.loaded[local])
            ]
            sink.close(chunk)
        sink.finish()
    got, expected = vllm_models.state(model), vllm_models.state(fresh.model)
    problems += [f"{name}: only on one side" for name in got.keys() ^ expected.keys()]
    problems += [name for name in got.keys() & expected.keys() if not _is_equal(got[name], expected[name])]
    problems += [f"{name}: moved" for name, address in addresses.items() if got[name].data_ptr() != address]
    return problems + _compare_linear(model, fresh.model)


def _copy(moves: Sequence[Move], have: Sequence[Tensors], targets: Mapping[str, torch.Tensor]) -> None:
    """Copy with the kernels, as the simulated world does."""
    read = {key: i for i, key in enumerate(dict.fromkeys((m.source, m.read.local) for m in moves))}
    write = {key: i for i, key in enumerate(dict.fromkeys(m.write.local for m in moves))}
    copies = [
        (m.tensor, Copy(m.box.shape, read[m.source, m.read.local], m.read, write[m.write.local], m.write))
        for m in moves
    ]
    sources = ops.buffer_table([have[rank][name] for rank, name in read])
    destinations = ops.buffer_table([targets[name] for name in write])
    for cast, table in copy_tables(copies):
        ops.segmented_copy(table, sources, destinations, cast=cast, num_threads=1)


def _compare_linear(model: nn.Module, fresh: nn.Module) -> list[str]:
    """Compare packed linear layers, whose weights are no tensors any more, by what they make of the identity."""
    problems = []
    others = dict(fresh.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            size = getattr(module, "input_size_per_partition", module.input_size)
            identity = torch.eye(size, dtype=module.params_dtype)
            got, expected = (m.quant_method.apply(m, identity, None) for m in (module, others[name]))
            if not _is_equal(got, expected):
                problems.append(f"{name}: packed weight")
    return problems


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether type, shape and bytes are equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
