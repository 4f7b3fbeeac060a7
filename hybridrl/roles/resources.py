"""The Ray cluster of a run, and pools of resources on it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridrl.errors import EngineError, HybridRLError
from hybridrl.observability.heartbeat import HEARTBEAT
from hybridrl.roles.placement import Bundle, Slot, in_node_order

T = TypeVar("T")

_OBJECT_STORE_BYTES = 200 << 20
"""Of a private cluster: batches, samples and plans pass through it, never weights. What does not fit spills to disk."""
_SPARE_CPUS = 2
_LOOPBACK = "127.0.0.1"


class Cluster:
    """A connection to Ray: to an existing cluster, or to a private one on this machine that ends with the context.

    Args:
        address: Of an existing cluster; None starts a private one.
        num_cpus: Logical CPUs of a private cluster, that is processes that it can run.
        logs_dir: Where a private cluster leaves what its workers wrote, when an error ends the context.

    Raises:
        EngineError: On entering, when there is no cluster at `address`, or a private one does not start.
    """

    def __init__(self, address: str | None, num_cpus: int, logs_dir: Path | None = None) -> None:
        self._address = address
        self._logs_dir = logs_dir
        self._num_cpus = num_cpus
        self._folder: str | None = None
        self._pools: list[ResourcePool] = []

    def __enter__(self) -> Cluster:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # A process that takes no device keeps the variables that it was started with; Ray would hide all devices from it.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            with _kept_stop_signal():
                self._connect()
        except BaseException as e:
            self._leave()
            if isinstance(e, Exception):  # a node that does not start in time is an Exception of no narrower class
                raise EngineError(self._no_cluster(e)) from e
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for pool in self._pools:
                pool.release()
            if isinstance(error, HybridRLError) and (kept := self._keep_logs()):
                error.args = (f"{error}\n{kept}",)
        finally:
            self._leave()

    def _keep_logs(self) -> str:
        """Copy the workers' logs out of the folder that is about to go, and return a line that says so; empty if there are none."""
        if self._folder is None or self._logs_dir is None:
            return ""
        try:
            found = Path(self._folder).glob("session_2*/logs/worker-*")
            logs = [log for log in found if log.suffix in (".out", ".err") and log.stat().st_size]
            self._logs_dir.mkdir(parents=True, exist_ok=True)
            for log in logs:
                shutil.copy(log, self._logs_dir)
        except OSError as e:  # a full disk, say: it must not take the place of what ended the run
            return f"the logs of worker processes could not be copied into {self._logs_dir}: {e}"
        return f"{len(logs)} logs of worker processes are in {self._logs_dir}" if logs else ""

    def _connect(self) -> None:
        if self._address is not None:
            ray.init(self._address, log_to_driver=False, logging_level=logging.ERROR)
            return
        self._folder = tempfile.mkdtemp(prefix="hybridrl-ray-")
        with _loopback_only():
            ray.init(
                "local",  # without it, RAY_ADDRESS in the environment would name the cluster
                num_cpus=self._num_cpus + _SPARE_CPUS,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=_LOOPBACK,
                _temp_dir=self._folder,
                # Idle workers that Ray would start ahead of time take cores from the ranks that start, and by default Ray
                # runs its workers at low priority.
                _system_config={"prestart_worker_first_driver": False, "worker_niceness": 0},
            )

    def _leave(self) -> None:
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _no_cluster(self, error: BaseException) -> str:
        if self._address is None:
            return (
                f"Ray did not start on this machine ({error}); check the free memory, /dev/shm and the temporary folder"
            )
        return (
            f"no Ray cluster at ray_address {self._address!r} ({error}); start one there with `ray start --head`, correct "
            "the address, or leave ray_address out to run on this machine alone"
        )

    def pool(self, bundles: Sequence[Bundle], timeout_s: float) -> ResourcePool:
        """Reserve resources; see :class:`ResourcePool`."""
        pool = ResourcePool(bundles, timeout_s)
        self._pools.append(pool)
        HEARTBEAT.advance()
        return pool


class ResourcePool:
    """Reserved bundles of resources, close together: on as few nodes as can be, and in the order of the nodes.

    Args:
        bundles: What to reserve.
        timeout_s: Bound on waiting for it.

    Attributes:
        nodes: On which each bundle lies, by Ray's names.

    Raises:
        EngineError: When the cluster does not have it in time; says what it has.
    """

    def __init__(self, bundles: Sequence[Bundle], timeout_s: float) -> None:
        self._group: PlacementGroup = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=timeout_s)
        except GetTimeoutError as e:
            remove_placement_group(self._group)
            raise EngineError(
                f"the cluster did not grant {_total(bundles)} within {timeout_s:g} s; it has {_known(ray.cluster_resources())}, "
                f"of which free {_known(ray.available_resources())}. Free them, or lower the parallel sizes or rollout.num_replicas"
            ) from e
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        self.nodes: list[str] = [nodes[index] for index in range(len(bundles))]
        self._bundles = in_node_order(bundles, self.nodes)

    def start_actor(self, cls: type[T], slot: Slot, *arguments: Any, python: str | None = None) -> ActorHandle[T]:
        """Start an actor on one bundle.

        Args:
            python: Command that runs Python in its process; None is the usual one.
        """
        handle: ActorHandle[T] = (
            ray.remote(cls)
            .options(
                num_cpus=slot.num_cpus,
                num_gpus=slot.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, self._bundles[slot.bundle]),
                runtime_env=None if python is None else {"py_executable": python},
            )
            .remote(*arguments)
        )
        return handle

    def release(self) -> None:
        """Give the bundles back; ends what runs on them. A cluster that does not answer does so itself once the run has ended."""
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)


@contextlib.contextmanager
def _kept_stop_signal() -> Iterator[None]:
    """Keep our own SIGTERM handler.

    ``ray.init`` takes seconds, in which a signal would meet the handlers that it installs first, and they exit on the spot. Last of all, its
    core installs one in C, which only a later call replaces.
    """
    handler, install = signal.getsignal(signal.SIGTERM), ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = install
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Make the Ray that starts inside listen on loopback alone.

    On Linux, Ray replaces a loopback address by that of a network and listens on all of them, because another node might
    join. This is the switch of the platforms where none can.
    """
    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    in_environment = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(name)
        if in_environment is not None:
            os.environ[name] = in_environment


def _total(bundles: Sequence[Bundle]) -> str:
    sums: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            sums[name] = sums.get(name, 0) + amount
    return _known(sums)


def _known(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
