"""The whole prediction: what a run of a configuration takes on a cluster, before anything is started.

    configuration, models, cluster -> parameters per stage -> memory per device and phase -> verdict
                                   -> weight sync, planned and priced
                                   -> workload, FLOPs, roofline -> seconds per phase

Pure: the declared layouts and the planner of the weight sync are all it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.schema import ExperimentConfig
from hybridrl.errors import ConfigError
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.roles import ModelRole, PlacedRole, megatron_roles
from hybridrl.planning.activations import stage_activations
from hybridrl.planning.bundles import bundled, largest_bundle, smallest_bundle
from hybridrl.planning.cluster import Cluster, read_cluster
from hybridrl.planning.generation import Replica, plan_replica
from hybridrl.planning.layouts import role_layout, role_spec
from hybridrl.planning.memory import (
    TRAINED_ROLES,
    DeviceMemory,
    RoleMemory,
    StageMemory,
    Verdict,
    device_memory,
    static_memory,
)
from hybridrl.planning.parameters import num_active_parameters, num_parameters, stage_parameters
from hybridrl.planning.pools import count_devices
from hybridrl.planning.timing import StepTiming, step_timing
from hybridrl.planning.weight_sync import SyncEstimate, plan_weight_sync
from hybridrl.planning.workload import Workload, workload


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Everything about memory.

    Attributes:
        export_bytes: Of the actor's checkpoint for Hugging Face; `training_state_bytes` with the optimizer's state.
    """

    roles: Mapping[ModelRole, RoleMemory]
    replica: Replica
    devices: tuple[DeviceMemory, ...]
    export_bytes: int
    training_state_bytes: int

    @property
    def stages(self) -> tuple[StageMemory, ...]:
        """The actor's pipeline stages."""
        return self.roles[ModelRole.ACTOR].stages

    @property
    def verdict(self) -> Verdict:
        """The worst of all devices."""
        order = list(Verdict)
        return max((device.verdict for device in self.devices), key=order.index)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run takes.

    Attributes:
        num_devices: Of both roles.
    """

    config: ExperimentConfig
    cluster: Cluster
    num_parameters: int
    num_active_parameters: int
    num_devices: int
    num_nodes: int
    work: Workload
    memory: MemoryPlan
    sync: SyncEstimate
    timing: StepTiming


def cluster_of(config: ExperimentConfig) -> Cluster:
    """Read the cluster that the configuration names.

    Raises:
        ConfigError: When it names none, the file is faulty, or the run needs more nodes than there are.
    """
    if config.plan.cluster is None:
        raise ConfigError("plan.cluster: got null, expected a cluster file; set it, e.g. to configs/clusters/h100.yaml")
    cluster, num_devices = read_cluster(Path(config.plan.cluster)), count_devices(config)
    there, needed = config.plan.num_nodes, count_nodes(config, cluster)
    if there is not None and there < needed:
        raise ConfigError(
            f"plan.num_nodes: got {there}, expected at least {needed} nodes of {cluster.devices_per_node} devices for the run's "
            f"{num_devices}; lower actor.parallel or rollout.num_replicas"
        )
    return cluster


def plan_run(config: ExperimentConfig, spec: ModelSpec, cluster: Cluster) -> RunPlan:
    """Predict a run.

    Args:
        spec: Of the policy.

    Raises:
        LayoutError: When a size does not divide.
    """
    sync = plan_weight_sync(config, bundled(spec, smallest_bundle(config, spec)), cluster)
    memory = plan_memory(config, spec, cluster, sync.price.staging_bytes)
    specs = {placed.role: role_spec(placed) for placed in megatron_roles(config)}
    return RunPlan(
        config=config,
        cluster=cluster,
        num_parameters=num_parameters(spec),
        num_active_parameters=num_active_parameters(spec),
        num_devices=count_devices(config),
        num_nodes=count_nodes(config, cluster),
        work=workload(config),
        memory=memory,
        sync=sync,
        timing=step_timing(config, specs, cluster, memory.replica, sync),
    )


def plan_memory(config: ExperimentConfig, spec: ModelSpec, cluster: Cluster, staging_bytes: int) -> MemoryPlan:
    """Predict the memory of every device.

    Args:
        spec: Of the policy.
        staging_bytes: Of a destination of a weight sync.

    Raises:
        LayoutError: When a size does not divide.
    """
    actor, *_ = placed_roles = megatron_roles(config)
    roles = {placed.role: _role_memory(config, placed) for placed in placed_roles}
    held = bundled(spec, largest_bundle(actor.parallel, spec))
    replica = plan_replica(config, spec, held, cluster, workload(config))
    devices = device_memory(config, cluster, roles, replica, staging_bytes)
    layout = role_layout(config, actor, spec)
    export = num_parameters(spec) * layout.dtype.itemsize
    per_stage = layout.sizes.tp * layout.sizes.cp * layout.sizes.dp
    optimizer = per_stage * sum(stage.static.optimizer for stage in roles[ModelRole.ACTOR].stages)
    return MemoryPlan(roles, replica, devices, export, export + optimizer)


def _role_memory(config: ExperimentConfig, placed: PlacedRole) -> RoleMemory:
    spec, work = role_spec(placed), workload(config, placed)
    layout = role_layout(config, placed, spec)
    held = role_layout(config, placed, bundled(spec, largest_bundle(placed.parallel, spec)))
    is_trained = placed.role in TRAINED_ROLES
    return RoleMemory(
        placed.role,
        tuple(
            StageMemory(
                stage,
                static_memory(stage, is_trained=is_trained),
                stage_activations(config, placed.parallel, layout, stage, work),
            )
            for stage in stage_parameters(held)
        ),
    )


def count_nodes(config: ExperimentConfig, cluster: Cluster) -> int:
    """Return the nodes of a cluster that a run takes."""
    return -(-count_devices(config) // cluster.devices_per_node)
