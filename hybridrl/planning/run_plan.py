"""The whole prediction: what a run of a configuration takes on a cluster, before anything is started.

    configuration, model, cluster -> parameters per stage -> memory per device and phase -> verdict
                                  -> weight sync, planned and priced
                                  -> workload, FLOPs, roofline -> seconds per phase

Pure: the declared layouts and the planner of the weight sync are all it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.schema import ExperimentConfig
from hybridrl.errors import ConfigError
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.planning.activations import stage_activations
from hybridrl.planning.bundles import bundled, largest_bundle, smallest_bundle
from hybridrl.planning.cluster import Cluster, read_cluster
from hybridrl.planning.generation import Replica, plan_replica
from hybridrl.planning.layouts import are_devices_shared, training_layout
from hybridrl.planning.memory import DeviceMemory, StageMemory, Verdict, device_memory, static_memory
from hybridrl.planning.parameters import num_active_parameters, num_parameters, stage_parameters
from hybridrl.planning.timing import StepTiming, step_timing
from hybridrl.planning.weight_sync import SyncEstimate, plan_weight_sync
from hybridrl.planning.workload import Workload, workload


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Everything about memory.

    Attributes:
        export_bytes: Of the checkpoint for Hugging Face; `training_state_bytes` with the optimizer's state.
    """

    stages: tuple[StageMemory, ...]
    replica: Replica
    devices: tuple[DeviceMemory, ...]
    export_bytes: int
    training_state_bytes: int

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

    Raises:
        LayoutError: When a size does not divide.
    """
    in_bundles = bundled(spec, smallest_bundle(config, spec))
    work, sync = workload(config), plan_weight_sync(config, in_bundles, cluster)
    memory = plan_memory(config, spec, cluster, work, sync.price.staging_bytes)
    timing = step_timing(config, spec, cluster, work, memory.replica, sync)
    counts, sizes = (
        (num_parameters(spec), num_active_parameters(spec)),
        (count_devices(config), count_nodes(config, cluster)),
    )
    return RunPlan(config, cluster, *counts, *sizes, work, memory, sync, timing)


def plan_memory(
    config: ExperimentConfig, spec: ModelSpec, cluster: Cluster, work: Workload, staging_bytes: int
) -> MemoryPlan:
    """Predict the memory of every device.

    Args:
        staging_bytes: Of a destination of a weight sync.

    Raises:
        LayoutError: When a size does not divide.
    """
    held = bundled(spec, largest_bundle(config, spec))
    replica = plan_replica(config, spec, held, cluster, work)
    layout = training_layout(config, spec)
    stages = tuple(
        StageMemory(
            parameters,
            static_memory(parameters, has_reference=config.algorithm.needs_reference),
            stage_activations(config, layout, parameters, work),
        )
        for parameters in stage_parameters(training_layout(config, held))
    )
    devices = device_memory(config, cluster, stages, replica, staging_bytes)
    export = num_parameters(spec) * layout.dtype.itemsize
    per_stage = layout.sizes.tp * layout.sizes.cp * layout.sizes.dp
    optimizer = per_stage * sum(stage.static.optimizer for stage in stages)
    return MemoryPlan(stages, replica, devices, export, export + optimizer)


def count_devices(config: ExperimentConfig) -> int:
    """Return the devices that a run takes; on a CPU a rank or worker stands for one."""
    training = parallel_sizes(config.actor.parallel).world_size
    generation = config.rollout.num_replicas * config.rollout.tp_size
    return max(training, generation) if are_devices_shared(config) else training + generation


def count_nodes(config: ExperimentConfig, cluster: Cluster) -> int:
    """Return the nodes of a cluster that a run takes."""
    return -(-count_devices(config) // cluster.devices_per_node)
