"""Memory of a device in each phase of a step, part by part, with the verdict.

    rollout      the actor's state; vLLM's pool
    log-probs    and the working set of a forward pass
    update       and the activations in flight
    weight sync  the actor's state and vLLM's pool, and what travels

The two roles are on devices of their own, or share them (placement: colocated), and nothing is moved off a device between phases:
shared devices hold the state of both at all times.

Bytes of the actor's state, per parameter of a rank, in bfloat16: 2 for itself, 4 for its gradient in float32, and 12 for its float32
copy and two moments, which the ranks that hold the same parameter share. In float32: 4, 4 and 8. Experts are shared by fewer
ranks, edp = tp cp dp / (ep etp), than the rest, cp dp.

Source: megatron-core 0.16.1, distributed/param_and_grad_buffer.py and optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from hybridrl.config.schema import ExperimentConfig, Platform
from hybridrl.layout.box import DType
from hybridrl.planning.activations import StageActivations
from hybridrl.planning.cluster import Cluster
from hybridrl.planning.generation import Replica
from hybridrl.planning.layouts import are_devices_shared
from hybridrl.planning.parameters import ParameterBuffer, StageParameters

_GRADIENT_BYTES = 4
_MOMENT_BYTES = 8
_MASTER_BYTES = 4
# Of a training process on a device: context, libraries' workspaces, communicators. An inference, not measured.
_RUNTIME_BYTES = 3 * 2**30
# What the allocator loses to fragments, of all that comes and goes.
_FRAGMENT_SHARE = 0.05
TIGHT_SHARE = 0.95


class Phase(enum.Enum):
    """A phase of a step."""

    ROLLOUT = "rollout"
    LOGPROBS = "log-probs"
    UPDATE = "update"
    WEIGHT_SYNC = "weight sync"


class Verdict(enum.Enum):
    """Whether a device has the memory."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """The state of a training rank, in bytes.

    Attributes:
        weights: Parameters and untrained buffers of the actor.
        gradients: In float32, as large as the parameters' buffers.
        optimizer: This rank's share.
        reference: Weights of the frozen reference, of a run that has one.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.reference


def static_memory(stage: StageParameters, *, has_reference: bool) -> StaticMemory:
    """Return the state of a rank of a pipeline stage."""
    return StaticMemory(
        weights=sum(b.num_padded * b.dtype.itemsize for b in stage.buffers) + stage.buffer_bytes,
        gradients=sum(b.num_padded * _GRADIENT_BYTES for b in stage.buffers),
        optimizer=sum(optimizer_bytes(b) for b in stage.buffers),
        reference=stage.model_bytes if has_reference else 0,
    )


def optimizer_bytes(buffer: ParameterBuffer) -> int:
    """Return one rank's share of the optimizer's state, on average: two moments, and a float32 copy of narrower parameters."""
    per_parameter = _MOMENT_BYTES + (0 if buffer.dtype is DType.FLOAT32 else _MASTER_BYTES)
    return -(-buffer.num_parameters // buffer.num_replicas) * per_parameter


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device in a phase.

    Attributes:
        pp_rank: Pipeline stage of its training rank; None on devices that only generate.
        parts: What is in its memory, in bytes.
    """

    pp_rank: int | None
    phase: Phase
    parts: Mapping[str, int]
    verdict: Verdict

    @property
    def device(self) -> str:
        """What the device is called in reports."""
        return "rollout worker" if self.pp_rank is None else f"stage {self.pp_rank}"

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The part with the most bytes."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One pipeline stage: its parameters, their state, and its activations."""

    parameters: StageParameters
    static: StaticMemory
    activations: StageActivations


def device_memory(
    config: ExperimentConfig, cluster: Cluster, stages: tuple[StageMemory, ...], replica: Replica, staging_bytes: int
) -> tuple[DeviceMemory, ...]:
    """Return the memory of the devices of every stage, and of those of replicas, in every phase.

    Args:
        staging_bytes: Of a destination of a weight sync; a source is given as much.
    """
    is_cuda, is_shared = config.platform is Platform.CUDA, are_devices_shared(config)
    pool = _pool(replica, is_cuda=is_cuda)
    landing = {"staging": staging_bytes, "module in load layout": replica.module_bytes}
    found = []
    for stage in stages:
        for phase in Phase:
            parts = _state(stage.static) | _transient(stage.activations, phase)
            if phase is Phase.WEIGHT_SYNC:
                parts |= {"staging": 2 * staging_bytes} if is_shared else {"staging": staging_bytes}
                parts |= {"module in load layout": replica.module_bytes} if is_shared else {}
            parts |= pool if is_shared else {}
            found.append(
                _judged(stage.parameters.pp_rank, phase, parts | _overhead(parts, pool, is_cuda=is_cuda), cluster)
            )
    if not is_shared:
        found.append(_judged(None, Phase.ROLLOUT, pool, cluster))
        found.append(_judged(None, Phase.WEIGHT_SYNC, pool | landing, cluster))
    return tuple(found)


def _state(static: StaticMemory) -> dict[str, int]:
    state = {"weights": static.weights, "gradients": static.gradients, "optimizer": static.optimizer}
    return state | ({"reference": static.reference} if static.reference else {})


def _transient(activations: StageActivations, phase: Phase) -> dict[str, int]:
    if phase is Phase.LOGPROBS:
        return {"activations": activations.forward, "logits": activations.scoring}
    if phase is Phase.UPDATE:
        return {"activations": activations.training, "logits": activations.loss}
    return {}


def _pool(replica: Replica, *, is_cuda: bool) -> dict[str, int]:
    parts = {"vLLM weights": replica.weight_bytes, "KV cache": replica.kv_bytes}
    if is_cuda:
        parts |= {"vLLM activations": replica.activation_bytes, "vLLM runtime": replica.runtime_bytes}
    return parts


def _overhead(parts: Mapping[str, int], pool: Mapping[str, int], *, is_cuda: bool) -> dict[str, int]:
    """Return what a training process takes besides; vLLM's pool has a size of its own, overhead included."""
    if not is_cuda:
        return {}
    own = sum(size for name, size in parts.items() if name not in pool)
    return {"runtime": _RUNTIME_BYTES, "fragments": int(_FRAGMENT_SHARE * own)}


def _judged(pp_rank: int | None, phase: Phase, parts: Mapping[str, int], cluster: Cluster) -> DeviceMemory:
    total = sum(parts.values())
    if total > cluster.memory_bytes:
        verdict = Verdict.DOES_NOT_FIT
    else:
        verdict = Verdict.TIGHT if total > TIGHT_SHARE * cluster.memory_bytes else Verdict.FITS
    return DeviceMemory(pp_rank, phase, parts, verdict)
