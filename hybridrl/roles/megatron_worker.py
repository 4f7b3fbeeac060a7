"""One training rank as a Ray actor: the actor model, and the frozen reference beside it when a KL term needs one.

This module imports no engine: torch reads its thread settings when it is first imported, so the worker sets its
environment first and imports the engine after.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future as PendingRecord
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.schema import ActorConfig, Platform, PolicyLossConfig, Precision
from hybridrl.data.batch import Floats, PolicyBatch, SequenceBatch
from hybridrl.errors import EngineError
from hybridrl.layout.shard import Place, ShardMap
from hybridrl.roles.node import meeting_address, this_node
from hybridrl.roles.ports import free_port

if TYPE_CHECKING:
    from hybridrl.checkpoint.manifest import FileRecord
    from hybridrl.engines.megatron.engine import MegatronEngine
    from hybridrl.engines.megatron.results import LogprobResult, UpdateMetrics
    from hybridrl.layout.model import ModelSpec
    from hybridrl.reshard.executor import Sender, TransferReport
    from hybridrl.reshard.plan import Plan
    from hybridrl.reshard.transports import Rendezvous, Transport

ROLE = "actor"


@dataclass(frozen=True, slots=True)
class MegatronLaunch:
    """What a training rank needs to start.

    Attributes:
        folder: HF checkpoint to start from.
        is_pretrained: Whether to load its weights; otherwise they are drawn from the seed.
        has_reference: Whether to keep a frozen copy of the starting weights.
        num_optimizer_steps: Steps of the whole run.
        replays_routing: Whether updates take recorded experts.
        timeout_s: Bound on every collective.
    """

    folder: Path
    is_pretrained: bool
    actor: ActorConfig
    precision: Precision
    platform: Platform
    seed: int
    has_reference: bool
    num_optimizer_steps: int
    timeout_s: float
    replays_routing: bool = False


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
    """The methods that the role's group calls on every rank, in the same order."""

    def __init__(self, rank: int, launch: MegatronLaunch) -> None:
        self._rank = rank
        self._launch = launch
        self._connection: _Connection | None = None
        self._writer = ThreadPoolExecutor(1)
        self._saving: PendingRecord[FileRecord] | None = None
        os.environ.update(_environment(launch))

    def rendezvous(self) -> tuple[str, int]:
        """Return an address of this rank's host and a free port on it, where the ranks can meet."""
        address = meeting_address()
        return address, free_port(address)

    def start(self, host: str, port: int) -> ShardMap:
        """Join the other ranks, build the models and load the weights; return where this rank keeps them."""
        from hybridrl.engines.megatron.process_groups import start_process_group
        from hybridrl.layout.families import read_model_spec
        from hybridrl.reshard.transports.store import address_towards, interface_of

        launch = self._launch
        self._prepare_platform()
        if interface := interface_of(address_towards(host, port)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        groups = start_process_group(
            self._rank, launch.actor.parallel, launch.platform, f"tcp://{host}:{port}", launch.timeout_s, 0
        )
        self._spec = read_model_spec(launch.folder)
        self._actor = self._build(self._spec, groups, is_trained=True)
        self._reference = self._build(self._spec, groups, is_trained=False) if launch.has_reference else None
        return self._actor.shard_map(self._place())

    def logprobs(self, batch: SequenceBatch, temperature: float) -> LogprobResult | None:
        """Run the actor forward; see :meth:`MegatronEngine.logprobs`."""
        return self._actor.logprobs(batch, temperature)

    def ref_logprobs(self, batch: SequenceBatch, temperature: float) -> LogprobResult | None:
        """Run the reference forward."""
        if self._reference is None:
            raise EngineError("ref_logprobs without a reference model; set algorithm.policy_loss.kl_coef above 0")
        return self._reference.logprobs(batch, temperature)

    def update(self, batch: PolicyBatch, loss: PolicyLossConfig, temperature: float) -> UpdateMetrics | None:
        """Take one optimizer step; see :meth:`MegatronEngine.update`."""
        return self._actor.update(batch, loss, temperature)

    def update_supervised(self, batch: SequenceBatch, loss_weights: Floats) -> UpdateMetrics | None:
        """Take one supervised optimizer step; see :meth:`MegatronEngine.update_supervised`."""
        return self._actor.update_supervised(batch, loss_weights)

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

    def begin_save(self, folder: Path) -> None:
        """Copy this rank's training state into host memory, and go on while a thread writes it into a folder."""
        from hybridrl.checkpoint.folder import rank_file
        from hybridrl.checkpoint.state_file import write_rank_state

        path = folder / rank_file(ROLE, self._rank)
        self._saving = self._writer.submit(write_rank_state, path, self._actor.state.snapshot())

    def poll_save(self, wait_s: float) -> RankSave:
        """Return how the save that was begun last stands, after at most `wait_s` seconds."""
        assert self._saving is not None, "poll_save before begin_save"
        wait([self._saving], wait_s)
        if not self._saving.done():
            return RankSave(is_done=False)
        try:
            return RankSave(is_done=True, record=self._saving.result())
        except OSError as e:
            return RankSave(is_done=True, error=str(e))

    def damage_of(self, folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
        """Read files of a checkpoint and return what is wrong with them."""
        from hybridrl.checkpoint.manifest import damage_of

        found = (damage_of(folder, name, record, reads_content=True) for name, record in files.items())
        return [damage for damage in found if damage]

    def load_state(self, paths: Sequence[Path]) -> None:
        """Take over the training state that the ranks of any layout wrote; see :meth:`TrainingState.load`."""
        self._actor.state.load(list(paths))

    def _build(self, spec: ModelSpec, groups: Any, *, is_trained: bool) -> MegatronEngine:
        from hybridrl.engines.megatron.engine import MegatronEngine

        launch = self._launch
        engine = MegatronEngine(
            spec,
            launch.folder,
            launch.actor.parallel,
            launch.precision,
            launch.platform,
            launch.actor.optimizer if is_trained else None,
            launch.actor.micro_batch,
            launch.seed,
            groups,
            launch.num_optimizer_steps,
            recompute=launch.actor.recompute,
            replays_routing=is_trained and launch.replays_routing,
            moe=launch.actor.moe,
        )
        if launch.is_pretrained:
            engine.load_checkpoint(launch.folder)
        return engine

    def _prepare_platform(self) -> None:
        import torch

        if self._launch.platform is Platform.CPU:
            from hybridrl.engines.megatron import cpu

            torch.set_num_threads(self._launch.actor.threads_per_rank)
            cpu.install()

    def _place(self) -> Place:
        return Place(ROLE, self._rank, this_node(), _device(self._launch.platform, self._rank))


def _environment(launch: MegatronLaunch) -> Mapping[str, str]:
    if launch.platform is not Platform.CPU:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {"OMP_NUM_THREADS": str(launch.actor.threads_per_rank), "TORCHDYNAMO_DISABLE": "1"}


def _device(platform: Platform, rank: int) -> str:
    """Name the memory that this rank's weights lie in; on CPU each rank stands for a device of its own."""
    if platform is Platform.CPU:
        return f"cpu:{ROLE}:{rank}"
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
