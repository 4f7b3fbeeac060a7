"""What the ranks of each pipeline stage hold, counted from the declared shard maps tensor by tensor.

All ranks of a stage hold as much: tensor, expert and data parallelism cut evenly. So one map per stage is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hybridrl.layout.box import DType
from hybridrl.layout.megatron import MegatronLayout, megatron_shard_map
from hybridrl.layout.megatron.pipeline import ModelChunk
from hybridrl.layout.model import DecoderLayer, ModelSpec, MoeMlp
from hybridrl.layout.shard import CanonicalTensor, Place, ShardMap

# Megatron-core's distributed optimizer begins a parameter at a multiple of 64 elements, and ends a buffer at one of 128.
# Source: megatron-core 0.16.1, distributed/param_and_grad_buffer.py.
PARAMETER_MULTIPLE = 64
_BUFFER_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class ParameterBuffer:
    """Parameters of one model chunk that share a gradient buffer: dense ones or experts, of one element type.

    Attributes:
        sizes: Elements of each parameter.
        num_replicas: Ranks that hold the same parameters, and share the optimizer's state of them.
    """

    is_expert: bool
    dtype: DType
    sizes: tuple[int, ...]
    num_replicas: int

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(self.sizes)

    @property
    def num_padded(self) -> int:
        """Elements of the buffer."""
        end = 0
        for size in reversed(self.sizes):
            end = _round_up(end, PARAMETER_MULTIPLE) + size
        return _round_up(end, math.lcm(self.num_replicas, _BUFFER_MULTIPLE))


@dataclass(frozen=True, slots=True)
class StageParameters:
    """What a rank of one pipeline stage holds.

    Attributes:
        buffer_bytes: Tensors that are not trained, such as correction biases.
    """

    pp_rank: int
    chunks: tuple[ModelChunk, ...]
    buffers: tuple[ParameterBuffer, ...]
    buffer_bytes: int

    @property
    def num_dense(self) -> int:
        """Parameters that tensor parallelism cuts or replicates."""
        return sum(buffer.num_parameters for buffer in self.buffers if not buffer.is_expert)

    @property
    def num_expert(self) -> int:
        """Parameters of routed experts."""
        return sum(buffer.num_parameters for buffer in self.buffers if buffer.is_expert)

    @property
    def num_layers(self) -> int:
        """Decoder layers of all chunks."""
        return sum(len(chunk.layers) for chunk in self.chunks)

    @property
    def has_output(self) -> bool:
        """Whether logits are computed here."""
        return any(chunk.has_output for chunk in self.chunks)

    @property
    def model_bytes(self) -> int:
        """Parameters and buffers of a model that is not trained."""
        return sum(b.num_parameters * b.dtype.itemsize for b in self.buffers) + self.buffer_bytes


def stage_parameters(layout: MegatronLayout) -> tuple[StageParameters, ...]:
    """Count what a rank of each pipeline stage holds.

    Raises:
        LayoutError: When a size does not divide.
    """
    sizes = layout.sizes
    per_stage = sizes.tp * sizes.cp * sizes.dp
    routed, untrained = _routed_names(layout.spec), _untrained_names(layout.spec)
    stages = []
    for pp_rank in range(sizes.pp):
        shard_map = megatron_shard_map(layout, Place("actor", pp_rank * per_stage, "", ""))
        named = {shard.local: shard.tensor for shard in shard_map.shards}
        grouped: dict[tuple[str, bool, DType], list[int]] = {}
        buffer_bytes = 0
        for name, tensor in shard_map.tensors.items():
            canonical, size = named.get(name), math.prod(tensor.shape)
            if canonical in untrained:
                buffer_bytes += size * tensor.dtype.itemsize
            else:
                key = (name.partition(".")[0], canonical in routed, tensor.dtype)
                grouped.setdefault(key, []).append(size)
        buffers = tuple(
            ParameterBuffer(is_expert, dtype, tuple(own), sizes.edp if is_expert else sizes.dp * sizes.cp)
            for (_, is_expert, dtype), own in grouped.items()
        )
        stages.append(StageParameters(pp_rank, layout.chunks(pp_rank), buffers, buffer_bytes))
    return tuple(stages)


def map_bytes(shard_map: ShardMap) -> int:
    """Return the bytes of all local tensors of a rank."""
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in shard_map.tensors.values())


def num_parameters(spec: ModelSpec) -> int:
    """Return the elements of all tensors of the checkpoint."""
    return _count(spec, lambda moe: moe.num_experts)


def num_active_parameters(spec: ModelSpec) -> int:
    """Return the elements that a token meets: of routed experts, those that it is sent to."""
    return _count(spec, lambda moe: moe.num_experts_per_token)


def layer_elements(layer: DecoderLayer) -> tuple[int, int]:
    """Return the elements that all tokens meet, and those of one routed expert."""
    mlp, hidden = layer.mlp, layer.attention.hidden_size
    outside = 2 * hidden + _elements(layer.attention.tensors())
    if not isinstance(mlp, MoeMlp):
        return outside + _elements(mlp.tensors()), 0
    common = _elements(mlp.router_tensors()) + _elements(mlp.shared_tensors())
    return outside + common, _elements(replace(mlp, num_experts=1).routed_tensors())


def _count(spec: ModelSpec, experts_met: Callable[[MoeMlp], int]) -> int:
    """Return the elements of a model with so many experts per layer."""
    total = _elements(replace(spec, layers=(), mtp_layers=()).tensors().values())
    total += len(spec.mtp_layers) * (3 * spec.hidden_size + 2 * spec.hidden_size**2)
    for layer in (*spec.layers, *(mtp.layer for mtp in spec.mtp_layers)):
        dense, per_expert = layer_elements(layer)
        total += dense + (experts_met(layer.mlp) * per_expert if isinstance(layer.mlp, MoeMlp) else 0)
    return total


def _elements(tensors: Iterable[CanonicalTensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _mixtures(spec: ModelSpec) -> Iterable[MoeMlp]:
    layers = (*spec.layers, *(mtp.layer for mtp in spec.mtp_layers))
    return [layer.mlp for layer in layers if isinstance(layer.mlp, MoeMlp)]


def _routed_names(spec: ModelSpec) -> frozenset[str]:
    return frozenset(tensor.name for moe in _mixtures(spec) for tensor in moe.routed_tensors())


def _untrained_names(spec: ModelSpec) -> frozenset[str]:
    return frozenset(moe.correction_bias for moe in _mixtures(spec) if moe.correction_bias)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
