"""Learns where a vLLM worker keeps each checkpoint element, by letting vLLM's own weight loaders tell.

The model's modules are put into load format on the meta device and its ``load_weights`` runs once on recording tensors, one per
canonical tensor. What it copies where is the worker's :class:`ShardMap`: fused QKV and gate/up projections, expert stacks,
tensor- and expert-parallel cuts and replicated KV heads need no rule of ours. The map is proved before it is used: every element
of every parameter is written exactly once, but for padding that vLLM itself declares.

The live weights are not touched; learning costs well under a millisecond per recorded copy and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from hybridrl.engines.vllm.boxes import merge_shards, shards_of_write
from hybridrl.engines.vllm.loadformat import LiveTensors, model_in_load_format
from hybridrl.engines.vllm.recording import RecordingTensor, WriteLog
from hybridrl.errors import LayoutError
from hybridrl.layout.box import DType
from hybridrl.layout.builder import check_local_coverage
from hybridrl.layout.shard import CanonicalTensor, LocalTensor, Place, Shard, ShardMap

DTYPES = {
    torch.float32: DType.FLOAT32,
    torch.bfloat16: DType.BFLOAT16,
    torch.float16: DType.FLOAT16,
    torch.int64: DType.INT64,
    torch.int32: DType.INT32,
    torch.uint8: DType.UINT8,
}


@dataclass(frozen=True, slots=True)
class LearnedLayout:
    """What one worker knows about its model after learning.

    Attributes:
        shard_map: Local tensors are named ``module.parameter``, in load format and in module order.
        tied: Local tensor -> other module parameters that are the same live tensor (tied embeddings, a router's correction bias).
    """

    shard_map: ShardMap
    tied: Mapping[str, tuple[str, ...]]


def learn_layout(
    model: nn.Module, canonical: Mapping[str, CanonicalTensor], dtype: torch.dtype, place: Place
) -> LearnedLayout:
    """Return the layout of a loaded model.

    Args:
        canonical: Every tensor of the checkpoint.
        dtype: Element type that the checkpoint tensors pretend to have while loaders run.

    Raises:
        LayoutError: A loader does more than slice and copy, or the copies do not cover a parameter exactly; names both.
    """
    tied = _tied_parameters(model)
    with model_in_load_format(model):
        tensors = _load_format_tensors(model, skip={name for names in tied.values() for name in names})
        log = WriteLog(tensors)
        model.load_weights((name, RecordingTensor.of(t, dtype, log)) for name, t in canonical.items())  # type: ignore[operator]
        shards = [shard for write in log.writes for shard in shards_of_write(write, canonical[write.tensor])]
        shard_map = _shard_map(model, tensors, shards, canonical, place, log.num_zeroed)
    check_local_coverage(shard_map)
    return LearnedLayout(shard_map, tied)


def split_local(local: str) -> tuple[str, str]:
    """Split ``module.parameter`` into its two parts."""
    module, _, parameter = local.rpartition(".")
    return module, parameter


def _tied_parameters(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, for each real weight that several modules hold, its first name -> its other names."""
    names: dict[nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules():
        if is_deferred_attention_layer(module):
            continue
        for name, parameter in LiveTensors.of(module).parameters.items():
            if parameter.numel() > 0:
                names.setdefault(parameter, []).append(f"{prefix}.{name}")
    return {first: tuple(others) for first, *others in names.values() if others}


def _load_format_tensors(model: nn.Module, skip: set[str]) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of a model in load format by local name, in module order."""
    tensors: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        current = LiveTensors.of(module)
        for name, tensor in (current.parameters | current.buffers).items():
            if f"{prefix}.{name}" not in skip:
                tensors[f"{prefix}.{name}"] = tensor
    return tensors


def _shard_map(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    shards: list[Shard],
    canonical: Mapping[str, CanonicalTensor],
    place: Place,
    num_zeroed: Mapping[str, int],
) -> ShardMap:
    """Build the map of everything that was loaded; a parameter that nothing was loaded into is an error.

    Args:
        num_zeroed: Elements of each local tensor that a loader fills with zeros.
    """
    by_local: dict[str, list[Shard]] = {}
    for shard in shards:
        by_local.setdefault(shard.local, []).append(shard)
    locals_: dict[str, LocalTensor] = {}
    padding: dict[str, int] = {}
    for name, tensor in tensors.items():
        if name not in by_local and name not in num_zeroed:
            _check_unloaded(model, name, tensor, place)
            continue
        locals_[name] = _local_tensor(name, tensor, place)
        own = by_local.setdefault(name, [])
        if declared := num_zeroed.get(name, 0) + _declared_padding(model, name, tensor, own):
            padding[name] = declared
    ordered = tuple(shard for name in locals_ for shard in merge_shards(by_local[name]))
    used = {shard.tensor for shard in ordered}
    return ShardMap(place, locals_, ordered, {n: t for n, t in canonical.items() if n in used}, padding)


def _local_tensor(name: str, tensor: torch.Tensor, place: Place) -> LocalTensor:
    if not tensor.is_contiguous():
        raise LayoutError(f"{place}: {name} has strides {tensor.stride()} in load format, expected a contiguous tensor")
    if tensor.dtype not in DTYPES:
        raise LayoutError(f"{place}: {name} has dtype {tensor.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    return LocalTensor(name, tuple(tensor.shape), DTYPES[tensor.dtype])


def _check_unloaded(model: nn.Module, name: str, tensor: torch.Tensor, place: Place) -> None:
    """Refuse a parameter that a checkpoint ought to fill; buffers and attention scales are computed, not loaded."""
    module = model.get_submodule(split_local(name)[0])
    if isinstance(tensor, nn.Parameter) and tensor.numel() > 0 and not is_deferred_attention_layer(module):
        raise LayoutError(
            f"{place}: no checkpoint tensor is loaded into {name} {tuple(tensor.shape)}; "
            "expected one: does the model family list every tensor of this checkpoint?"
        )


def _declared_padding(model: nn.Module, name: str, tensor: torch.Tensor, shards: list[Shard]) -> int:
    """Return how many elements no loader fills, where vLLM says that there may be such: vocabulary rows, padded experts."""
    module = model.get_submodule(split_local(name)[0])
    if isinstance(module, VocabParallelEmbedding):
        loaded = sum(math.prod(shard.box.shape) for shard in shards)
        return max(tensor.numel() - loaded, 0)
    return tensor.numel() - int(getattr(tensor, "weight_loader_numel", tensor.numel()))
