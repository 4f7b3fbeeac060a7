"""What to change when a plan does not fit: single changes that are tried on the plan itself, and kept when they help.

A shortfall names the device, the phase and the largest part; each change comes with the memory that it leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hybridrl.config.choices import Recompute
from hybridrl.config.schema import ExperimentConfig
from hybridrl.errors import LayoutError
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.parallel import alignment
from hybridrl.planning.cluster import Cluster
from hybridrl.planning.memory import TIGHT_SHARE, DeviceMemory, Verdict
from hybridrl.planning.pools import count_devices, pool_of_rollout
from hybridrl.planning.run_plan import MemoryPlan, RunPlan, plan_memory
from hybridrl.planning.units import binary

_MOST_CHANGES = 3

Reload = Callable[[Sequence[str]], ExperimentConfig | None]
"""(settings that replace others) -> the configuration with them, or None when it does not pass all checks."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the configuration, as it is written on the command line, and what it leads to.

    Attributes:
        worst_bytes: Of the device that then has the least room.
        num_devices: That the run then takes.
    """

    settings: str
    worst_bytes: int
    num_devices: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why a plan does not fit, and what would help."""

    problem: str
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        lines = [
            f"{change.settings}: {binary(change.worst_bytes)} on the fullest of {change.num_devices} devices, "
            f"{change.verdict.value}"
            for change in self.changes
        ]
        return "\n".join([self.problem, *(f"  try {line}" for line in lines or ["more devices, or a smaller model"])])


def shortfall(plan: RunPlan, spec: ModelSpec, reload: Reload) -> Shortfall | None:
    """Return what keeps a plan from fitting; None when it fits."""
    problem = _problem(plan.config, plan.memory, plan.cluster)
    if problem is None:
        return None
    found = []
    for settings in _candidates(plan):
        changed = reload(settings)
        if changed is not None and (change := _try(" ".join(settings), changed, spec, plan)) is not None:
            found.append(change)
    enough = [change for change in found if change.verdict is not Verdict.DOES_NOT_FIT]
    best = sorted(enough or found, key=lambda change: (change.num_devices, change.worst_bytes))
    return Shortfall(problem, tuple(best[:_MOST_CHANGES]))


def _problem(config: ExperimentConfig, memory: MemoryPlan, cluster: Cluster) -> str | None:
    replica, needed = memory.replica, config.rollout.max_model_tokens
    if replica.kv_tokens < needed:
        return (
            f"{config.placement.rollout}, rollout worker, rollout: the KV cache holds {replica.kv_tokens} tokens, fewer than one sample of "
            f"{needed} (rollout.max_model_tokens); of vLLM's {binary(replica.pool_bytes)} its weights take "
            f"{binary(replica.weight_bytes)}"
        )
    worst = fullest(memory)
    if worst.verdict is not Verdict.DOES_NOT_FIT:
        return None
    return (
        f"{worst.device}, {worst.phase.value}: needs {binary(worst.total)} of {cluster.memory_gib:g} GiB; the largest part is "
        f"{worst.largest}, {binary(worst.parts[worst.largest])}"
    )


def fullest(memory: MemoryPlan) -> DeviceMemory:
    """Return the device and phase with the most memory in use."""
    return max(memory.devices, key=lambda device: device.total)


def _try(settings: str, changed: ExperimentConfig, spec: ModelSpec, plan: RunPlan) -> Change | None:
    """Return a change with what it leads to; None when it does not help."""
    try:
        memory = plan_memory(changed, spec, plan.cluster, plan.sync.price.staging_bytes)
    except LayoutError:
        return None
    worst = fullest(memory)
    fits = _problem(changed, memory, plan.cluster) is None
    if not fits and worst.total >= fullest(plan.memory).total:
        return None
    verdict = worst.verdict if fits else Verdict.DOES_NOT_FIT
    return Change(settings, worst.total, count_devices(changed), verdict)


def _candidates(plan: RunPlan) -> Iterator[tuple[str, ...]]:
    """Yield single changes, as settings of the command line."""
    config, parallel, rollout = plan.config, plan.config.actor.parallel, plan.config.rollout
    multiple = alignment(parallel)
    fewest = -(-rollout.max_model_tokens // multiple) * multiple
    if config.actor.recompute is not Recompute.FULL:
        yield ("actor.recompute=full",)
    if config.actor.micro_batch.tokens > fewest:
        yield (f"actor.micro_batch.tokens={fewest}",)
    half = (f"actor.parallel.dp_size={parallel.dp_size // 2}",) if parallel.dp_size % 2 == 0 else ()
    yield (f"actor.parallel.ep_size={2 * parallel.ep_size}",)
    yield (f"actor.parallel.dp_size={2 * parallel.dp_size}",)
    for axis in ("tp_size", "cp_size", "pp_size"):
        yield (f"actor.parallel.{axis}={2 * getattr(parallel, axis)}", *half)
    wider = (f"rollout.tp_size={2 * rollout.tp_size}", f"rollout.num_replicas={rollout.num_replicas // 2}")
    room = _room(plan)
    if rollout.num_replicas % 2 == 0:
        yield (*wider, *room)
    if room:
        yield room
    yield (f"rollout.gpu_memory_fraction={_least_fraction(plan):g}",)


def _room(plan: RunPlan) -> tuple[str, ...]:
    """Return the setting that gives vLLM what training leaves of a device that they share; empty where there is none."""
    rest = fullest(plan.memory).total - plan.memory.replica.pool_bytes
    percent = int(100 * (TIGHT_SHARE - rest / plan.cluster.memory_bytes))
    return (
        (f"rollout.gpu_memory_fraction={percent / 100:g}",)
        if pool_of_rollout(plan.config).is_shared and percent > 0
        else ()
    )


def _least_fraction(plan: RunPlan) -> float:
    """Return the share of a device's memory in which vLLM has room for one sample."""
    replica = plan.memory.replica
    needed = replica.weight_bytes + replica.activation_bytes + replica.runtime_bytes
    needed += replica.kv_bytes_per_token * plan.config.rollout.max_model_tokens
    return (1 + int(100 * needed / plan.cluster.memory_bytes)) / 100
