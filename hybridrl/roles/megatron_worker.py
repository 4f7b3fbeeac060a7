"""One Megatron rank as a Ray actor: its part of every model of its pool, each with a role.

This module imports no engine: torch reads its thread settings when it is first imported, so the worker sets its
environment first and imports the engine after.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future as PendingSave
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.algorithm import PolicyLossConfig
from hybridrl.config.choices import Platform
from hybridrl.data.batch import Floats, PolicyBatch, SequenceBatch, ValueBatch
from hybridrl.engines.profiler import Profiler
from hybridrl.errors import EngineError
from hybridrl.layout.roles import ModelRole
from hybridrl.layout.shard import Place, ShardMap
from hybridrl.observability.heartbeat import HEARTBEAT, Identity
from hybridrl.roles.megatron_launch import MegatronLaunch, ModelLaunch
from hybridrl.roles.node import meeting_address, this_node
from hybridrl.roles.ports import free_port

if TYPE_CHECKING:
    from hybridrl.checkpoint.manifest import FileRecord
    from hybridrl.checkpoint.state_file import RankState
    from hybridrl.engines.megatron.engine import MegatronEngine
    from hybridrl.engines.megatron.process_groups import ProcessGroups
    from hybridrl.engines.megatron.results import LogprobResult, UpdateMetrics, ValueMetrics
    from hybridrl.engines.megatron.value_engine import ValueEngine
    from hybridrl.reshard.executor import Sender, TransferReport
    from hybridrl.reshard.plan import Plan
    from hybridrl.reshard.transports import Rendezvous, Transport


@dataclass(frozen=True, slots=True)
class RankSave:
    """How a rank's save stands.

    Attributes:
        record: Of the file, once it is on disk.
        error: Why it could not be written.
    """

    is_done: bool
    record: FileRecord | None = None
    error: str | None = None


@dataclass(slots=True)
class _Connection:
    transport: Transport
    sender: Sender


class MegatronWorker:
    """The methods that the groups of the pool call on every rank, in the same order."""

    def __init__(self, rank: int, launch: MegatronLaunch) -> None:
        self._rank = rank
        self._launch = launch
        self._policies: dict[ModelRole, MegatronEngine] = {}
        self._value_models: dict[ModelRole, ValueEngine] = {}
        self._connection: _Connection | None = None
        self._profiler = Profiler(launch.profile, rank)
        self._writer = ThreadPoolExecutor(1)
        self._saving: dict[ModelRole, PendingSave[RankSave]] = {}
        os.environ.update(_environment(launch))
        HEARTBEAT.show(Identity(launch.session, launch.roles, rank))

    def rendezvous(self) -> tuple[str, int]:
        """Return an address of this rank's host and a free port on it, where the ranks can meet."""
        address = meeting_address()
        return address, free_port(address)

    def start(self, host: str, port: int) -> None:
        """Join the other ranks, build the models and load the weights."""
        from hybridrl.engines.megatron.process_groups import start_process_group
        from hybridrl.reshard.transports.store import address_towards, interface_of

        launch = self._launch
        self._prepare_platform()
        if interface := interface_of(address_towards(host, port)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        groups = start_process_group(
            self._rank, launch.parallel, launch.platform, f"tcp://{host}:{port}", launch.timeout_s, 0
        )
        for model in launch.models:
            self._build(model, groups)

    def shard_map(self) -> ShardMap:
        """Return where this rank keeps the actor's weights."""
        return self._actor.shard_map(self._place())

    def logprobs(self, role: ModelRole, batch: SequenceBatch, temperature: float) -> LogprobResult | None:
        """Run a policy forward; see :meth:`MegatronEngine.logprobs`."""
        with self._profiler.call(role.value, "logprobs"):
            return self._policies[role].logprobs(batch, temperature)

    def values(self, batch: SequenceBatch) -> Floats | None:
        """Run the critic forward; see :meth:`ValueEngine.values`."""
        with self._profiler.call(ModelRole.CRITIC.value, "values"):
            return self._value_models[ModelRole.CRITIC].values(batch)

    def rewards(self, batch: SequenceBatch) -> Floats | None:
        """Run the reward model forward; see :meth:`ValueEngine.rewards`."""
        with self._profiler.call(ModelRole.REWARD_MODEL.value, "rewards"):
            return self._value_models[ModelRole.REWARD_MODEL].rewards(batch)

    def update(
        self, batch: PolicyBatch, loss: PolicyLossConfig, temperature: float, want_logprobs: bool
    ) -> UpdateMetrics | None:
        """Take one optimizer step of the actor; see :meth:`MegatronEngine.update`."""
        with self._profiler.call(ModelRole.ACTOR.value, "update"):
            return self._actor.update(batch, loss, temperature, want_logprobs)

    def update_supervised(self, batch: SequenceBatch, loss_weights: Floats) -> UpdateMetrics | None:
        """Take one supervised optimizer step of the actor; see :meth:`MegatronEngine.update_supervised`."""
        return self._actor.update_supervised(batch, loss_weights)

    def update_values(self, batch: ValueBatch, clip_value: float | None) -> ValueMetrics | None:
        """Take one optimizer step of the critic; see :meth:`ValueEngine.update_values`."""
        with self._profiler.call(ModelRole.CRITIC.value, "update"):
            return self._value_models[ModelRole.CRITIC].update_values(batch, clip_value)

    def begin_profile(self, step: int) -> None:
        """Profile the calls of a step, if this rank is profiled."""
        self._profiler.begin(step)

    def end_profile(self) -> None:
        """Profile no more calls."""
        self._profiler.end()

    def connect_sync(self, rendezvous: Rendezvous, plan: Plan, verify: bool) -> None:
        """Connect to the rollout workers, which connect at the same time; an earlier connection is closed.

        Args:
            plan: This rank's part.
        """
        from hybridrl.reshard.executor import Sender
        from hybridrl.reshard.transports import open_transport

        if self._connection is not None:
            self._connection.transport.close()
            self._connection = None
        source = plan.sources.index(self._place())
        transport = open_transport(rendezvous, plan, source=source)
        self._connection = _Connection(transport, Sender(plan, source, transport, verify=verify))

    def send_weights(self, version: int, deadline_s: float) -> TransferReport:
        """Send this rank's share of the weights as `version`."""
        if self._connection is None:
            raise EngineError("send_weights before connect_sync; connect both sides first")
        return self._connection.sender.run(self._actor.tensors(), version, deadline_s)

    def save_checkpoint(self, folder: Path) -> None:
        """Write this rank's share of an HF checkpoint; see :meth:`MegatronEngine.save_checkpoint`."""
        self._actor.save_checkpoint(folder)

    def begin_save(self, role: ModelRole, folder: Path) -> None:
        """Copy this rank's training state of a model into host memory, and go on while a thread writes it into a folder.

        Raises:
            EngineError: The copy before it is still being written; a second one might not fit into memory.
        """
        from hybridrl.checkpoint.folder import rank_file

        if role in self._saving and not self._saving[role].done():
            raise EngineError(
                f"begin_save of {role.value} while the one before it is written; poll_save until it is done"
            )
        path = folder / rank_file(role.value, self._rank)
        self._saving[role] = self._writer.submit(_written, path, self._trained(role).state.snapshot())

    def poll_save(self, role: ModelRole, wait_s: float) -> RankSave:
        """Return how the save of a model that was begun last stands, after at most `wait_s` seconds."""
        saving = self._saving[role]
        wait([saving], wait_s)
        return saving.result() if saving.done() else RankSave(is_done=False)

    def damage_of(self, folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
        """Read files of a checkpoint and return what is wrong with them."""
        from hybridrl.checkpoint.manifest import damage_of

        found = (damage_of(folder, name, record, reads_content=True) for name, record in files.items())
        return [damage for damage in found if damage]

    def load_state(self, role: ModelRole, paths: Sequence[Path]) -> None:
        """Take over the training state that the ranks of any layout wrote; see :meth:`TrainingState.load`."""
        self._trained(role).state.load(list(paths))

    def _trained(self, role: ModelRole) -> MegatronEngine:
        return self._value_models[role] if role.has_values else self._policies[role]

    @property
    def _actor(self) -> MegatronEngine:
        return self._policies[ModelRole.ACTOR]

    def _build(self, model: ModelLaunch, groups: ProcessGroups) -> None:
        from hybridrl.engines.megatron.engine import MegatronEngine
        from hybridrl.engines.megatron.value_engine import ValueEngine
        from hybridrl.layout.families import read_model_spec
        from hybridrl.layout.value_model import read_value_model_spec

        launch = self._launch
        arguments: dict[str, Any] = {
            "hf_folder": model.folder,
            "parallel": launch.parallel,
            "precision": launch.precision,
            "platform": launch.platform,
            "optimizer": model.optimizer,
            "micro_batch": model.micro_batch,
            "seed": launch.seed,
            "groups": groups,
            "num_optimizer_steps": model.num_optimizer_steps,
            "recompute": model.recompute,
            "replays_routing": model.replays_routing,
            "moe": model.moe,
        }
        engine: MegatronEngine
        if model.role.has_values:
            engine = self._value_models[model.role] = ValueEngine(read_value_model_spec(model.folder), **arguments)
        else:
            engine = self._policies[model.role] = MegatronEngine(read_model_spec(model.folder), **arguments)
        if model.is_pretrained:
            engine.load_checkpoint(model.folder)

    def _prepare_platform(self) -> None:
        import torch

        if self._launch.platform is Platform.CPU:
            from hybridrl.engines.megatron import cpu

            torch.set_num_threads(self._launch.threads_per_rank)
            cpu.install()

    def _place(self) -> Place:
        return Place(ModelRole.ACTOR.value, self._rank, this_node(), _device(self._launch.platform, self._rank))


def _written(path: Path, state: RankState) -> RankSave:
    """Write a rank's file. An error is a value: kept as an exception, its traceback would keep the state in memory."""
    from hybridrl.checkpoint.state_file import write_rank_state

    try:
        return RankSave(is_done=True, record=write_rank_state(path, state))
    except OSError as e:
        return RankSave(is_done=True, error=str(e))


def _environment(launch: MegatronLaunch) -> Mapping[str, str]:
    if launch.platform is not Platform.CPU:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {"OMP_NUM_THREADS": str(launch.threads_per_rank), "TORCHDYNAMO_DISABLE": "1"}


def _device(platform: Platform, rank: int) -> str:
    """Name the memory that this rank's weights lie in; on CPU each rank stands for a device of its own."""
    if platform is Platform.CPU:
        return f"cpu:{ModelRole.ACTOR.value}:{rank}"
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
