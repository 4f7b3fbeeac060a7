"""Memory of a device in each phase of a step, part by part, with the verdict.

    rollout         the state of the pool's Megatron models; vLLM's pool
    forward passes  and the working set of one of them: log-probs, values, rewards
    update          and the activations in flight of one of those that are trained
    weight sync     the state and vLLM's pool, and what travels

Nothing is moved off a device between phases: a pool's devices hold the state of all its roles at all times.

Bytes of the state, per parameter of a rank, in bfloat16: 2 for itself, and when it is trained 4 for its gradient in float32, and 12 for
its float32 copy and two moments, which the ranks that hold the same parameter share. In float32: 4, 4 and 8. Experts are shared
by fewer ranks, edp = tp cp dp / (ep etp), than the rest, cp dp.

Source: megatron-core 0.16.1, distributed/param_and_grad_buffer.py and optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridrl.config.choices import Platform
from hybridrl.config.schema import ExperimentConfig
from hybridrl.layout.box import DType
from hybridrl.layout.roles import ModelRole
from hybridrl.planning.activations import StageActivations
from hybridrl.planning.cluster import Cluster
from hybridrl.planning.generation import Replica
from hybridrl.planning.parameters import ParameterBuffer, StageParameters
from hybridrl.planning.pools import run_pools

_GRADIENT_BYTES = 4
_MOMENT_BYTES = 8
_MASTER_BYTES = 4
# Of a training process on a device: context, libraries' workspaces, communicators. An inference, not measured.
_RUNTIME_BYTES = 3 * 2**30
# What PyTorch's allocator loses to fragments, of the state and of what comes and goes: Adam makes its moments in the first step, out of
# segments that activations left, and no segment with a piece of state in it is whole again. An inference, not measured.
_FRAGMENT_SHARE = 0.05
TIGHT_SHARE = 0.95
TRAINED_ROLES = frozenset({ModelRole.ACTOR, ModelRole.CRITIC})
_PREFIXES = {
    ModelRole.ACTOR: "",
    ModelRole.REFERENCE: "reference ",
    ModelRole.CRITIC: "critic ",
    ModelRole.REWARD_MODEL: "reward model ",
}


class Phase(enum.Enum):
    """A phase of a step."""

    ROLLOUT = "rollout"
    FORWARD = "forward passes"
    UPDATE = "update"
    WEIGHT_SYNC = "weight sync"


class Verdict(enum.Enum):
    """Whether a device has the memory."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """The state of a model on a rank, in bytes.

    Attributes:
        weights: Parameters and untrained buffers.
        gradients: In float32, as large as the parameters' buffers; 0 of a frozen model, as is `optimizer`.
        optimizer: This rank's share.
    """

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def static_memory(stage: StageParameters, *, is_trained: bool) -> StaticMemory:
    """Return the state of a rank of a pipeline stage."""
    if not is_trained:
        return StaticMemory(stage.model_bytes, 0, 0)
    return StaticMemory(
        weights=sum(b.num_padded * b.dtype.itemsize for b in stage.buffers) + stage.buffer_bytes,
        gradients=sum(b.num_padded * _GRADIENT_BYTES for b in stage.buffers),
        optimizer=sum(optimizer_bytes(b) for b in stage.buffers),
    )


def optimizer_bytes(buffer: ParameterBuffer) -> int:
    """Return one rank's share of the optimizer's state, on average: two moments, and a float32 copy of narrower parameters."""
    per_parameter = _MOMENT_BYTES + (0 if buffer.dtype is DType.FLOAT32 else _MASTER_BYTES)
    return -(-buffer.num_parameters // buffer.num_replicas) * per_parameter


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device in a phase.

    Attributes:
        pool: Name of its pool.
        pp_rank: Pipeline stage of its Megatron rank; None on devices that only generate.
        parts: What is in its memory, in bytes.
    """

    pool: str
    pp_rank: int | None
    phase: Phase
    parts: Mapping[str, int]
    verdict: Verdict

    @property
    def device(self) -> str:
        """What the device is called in reports."""
        return f"{self.pool}, " + ("rollout worker" if self.pp_rank is None else f"stage {self.pp_rank}")

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
    """One pipeline stage of a role: its parameters, their state, and its activations."""

    parameters: StageParameters
    static: StaticMemory
    activations: StageActivations


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """A Megatron role."""

    role: ModelRole
    stages: tuple[StageMemory, ...]

    @property
    def is_trained(self) -> bool:
        """Whether it has gradients and an optimizer."""
        return self.role in TRAINED_ROLES


def device_memory(
    config: ExperimentConfig,
    cluster: Cluster,
    roles: Mapping[ModelRole, RoleMemory],
    replica: Replica,
    staging_bytes: int,
) -> tuple[DeviceMemory, ...]:
    """Return the memory of the devices of every pool in every phase.

    Args:
        staging_bytes: Of a destination of a weight sync; a source is given as much.
    """
    found = []
    for pool in run_pools(config):
        members = [roles[placed.role] for placed in pool.roles]
        for stage in range(len(members[0].stages) if members else 0):
            for phase in Phase:
                own = _of_rank(members, stage, phase, staging_bytes)
                workers = _of_worker(replica, phase, staging_bytes) if pool.is_shared else {}
                overhead = _overhead(own) if config.platform is Platform.CUDA else {}
                found.append(_judged(pool.name, stage, phase, _sum(own, workers, overhead), cluster))
        if pool.num_workers and not pool.is_shared:
            for phase in (Phase.ROLLOUT, Phase.WEIGHT_SYNC):
                found.append(_judged(pool.name, None, phase, _of_worker(replica, phase, staging_bytes), cluster))
    return tuple(found)


def _of_rank(members: Sequence[RoleMemory], stage: int, phase: Phase, staging_bytes: int) -> dict[str, int]:
    """Return what a Megatron rank holds: the state of all its models, and what one of them at a time needs to compute."""
    parts: dict[str, int] = {}
    for member in members:
        static, prefix = member.stages[stage].static, _PREFIXES[member.role]
        named = {"weights": static.weights, "gradients": static.gradients, "optimizer": static.optimizer}
        parts |= {f"{prefix}{name}": size for name, size in named.items() if size}
    busy = [m.stages[stage].activations for m in members if m.is_trained or phase is Phase.FORWARD]
    if phase is Phase.FORWARD:
        most = max(busy, key=lambda used: used.forward + used.scoring)
        parts |= {"activations": most.forward, "logits": most.scoring}
    elif phase is Phase.UPDATE and busy:
        most = max(busy, key=lambda used: used.training + used.loss)
        parts |= {"activations": most.training, "logits": most.loss}
    elif phase is Phase.WEIGHT_SYNC and any(member.role is ModelRole.ACTOR for member in members):
        parts["staging"] = staging_bytes
    return parts


def _of_worker(replica: Replica, phase: Phase, staging_bytes: int) -> dict[str, int]:
    parts = {
        "vLLM weights": replica.weight_bytes,
        "KV cache": replica.kv_bytes,
        "vLLM activations": replica.activation_bytes,
        "vLLM runtime": replica.runtime_bytes,
    }
    if phase is Phase.WEIGHT_SYNC:
        parts |= {"staging": staging_bytes, "module in load layout": replica.module_bytes}
    return parts


def _overhead(own: Mapping[str, int]) -> dict[str, int]:
    """Return what a Megatron process takes besides; vLLM's pool has a size of its own, overhead included."""
    return {"runtime": _RUNTIME_BYTES, "fragments": int(_FRAGMENT_SHARE * sum(own.values()))}


def _sum(*groups: Mapping[str, int]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for parts in groups:
        total.update(parts)
    return dict(total)


def _judged(pool: str, pp_rank: int | None, phase: Phase, parts: Mapping[str, int], cluster: Cluster) -> DeviceMemory:
    total = sum(parts.values())
    if total > cluster.memory_bytes:
        verdict = Verdict.DOES_NOT_FIT
    else:
        verdict = Verdict.TIGHT if total > TIGHT_SHARE * cluster.memory_bytes else Verdict.FITS
    return DeviceMemory(pool, pp_rank, phase, parts, verdict)
