"""The training role as the controller sees it: typed calls on all ranks, answers in batch order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hybridrl.checkpoint.folder import rank_file
from hybridrl.config.schema import PolicyLossConfig, TrainerConfig
from hybridrl.data.batch import Floats, PolicyBatch, SequenceBatch
from hybridrl.layout.cost import SequenceCost
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import ShardMap
from hybridrl.roles.deadline import inner_s
from hybridrl.roles.dispatch import (
    Dispatch,
    broadcast,
    from_reporting_ranks,
    join_rows,
    per_rank,
    rows_of_dp_ranks,
    scatter_dp,
)
from hybridrl.roles.future import Future, wait_for
from hybridrl.roles.group import RoleGroup
from hybridrl.roles.megatron_worker import ROLE, MegatronLaunch, MegatronWorker, RankSave
from hybridrl.roles.placement import Slot
from hybridrl.roles.resources import ResourcePool

if TYPE_CHECKING:
    from hybridrl.checkpoint.manifest import FileRecord
    from hybridrl.engines.megatron.results import UpdateMetrics
    from hybridrl.reshard.executor import TransferReport
    from hybridrl.reshard.plan import Plan
    from hybridrl.reshard.transports import Rendezvous


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probs and entropies of a whole batch.

    Attributes:
        logprobs: [num_samples, max_tokens] float32; entry t belongs to token t, entry 0 is 0.
        entropies: [num_samples, max_tokens] float32.
        routing: [num_samples, max_tokens, num_moe_layers, top_k] int16 experts that the pass chose; None unless it recorded them.
    """

    logprobs: Floats
    entropies: Floats
    routing: NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True)
class RoleSave:
    """How the save of all ranks stands.

    Attributes:
        is_done: Whether every rank has written its file, or failed to.
        files: Those that are on disk, by name.
        errors: One line per rank that failed.
    """

    is_done: bool
    files: Mapping[str, FileRecord]
    errors: tuple[str, ...] = ()


class MegatronGroup:
    """All ranks of the training role.

    Args:
        temperature: Divides the logits, as in sampling.
        loss: Policy loss of every update.
        cost: Of sequences, for balancing data-parallel ranks.
        timeouts: Bounds on start, log-prob passes and updates.
    """

    def __init__(
        self,
        pool: ResourcePool,
        slots: Sequence[Slot],
        sizes: ParallelSizes,
        launch: MegatronLaunch,
        *,
        temperature: float,
        loss: PolicyLossConfig,
        cost: SequenceCost,
        timeouts: TrainerConfig,
    ) -> None:
        actors = [pool.start_actor(MegatronWorker, slot, rank, launch) for rank, slot in enumerate(slots)]
        self._group = RoleGroup(ROLE, actors, [sizes.coordinates(rank).dp for rank in range(sizes.world_size)])
        self._dp_size = sizes.dp
        self._temperature = temperature
        self._loss = loss
        self._cost = cost
        self._timeouts = timeouts

    @property
    def dp_size(self) -> int:
        """Data-parallel degree: rows of a batch are dealt out to so many ranks."""
        return self._dp_size

    def rendezvous(self) -> tuple[str, int]:
        """Return the address of rank 0's host and a free port there."""
        first: Future[tuple[str, int]] = self._group.call(
            "rendezvous", broadcast(), _first, phase="rendezvous", timeout_s=self._timeouts.startup_timeout_s
        )
        return wait_for(first)

    def start(self) -> Future[list[ShardMap]]:
        """Start all ranks and load the weights; the answer is where each rank keeps them."""
        return self._group.call(
            "start", broadcast(*self.rendezvous()), list, phase="start", timeout_s=self._timeouts.startup_timeout_s
        )

    def logprobs(self, batch: SequenceBatch) -> Future[TokenLogprobs]:
        """Compute log-probs under the actor."""
        return self._logprobs("logprobs", batch)

    def ref_logprobs(self, batch: SequenceBatch) -> Future[TokenLogprobs]:
        """Compute log-probs under the frozen reference."""
        return self._logprobs("ref_logprobs", batch)

    def update(self, batch: PolicyBatch) -> Future[UpdateMetrics]:
        """Take one optimizer step on the policy loss."""
        rows = self._rows(batch.sequences)
        arguments = [(batch.select(part), self._loss, self._temperature) for part in rows]
        return self._train_step("update", scatter_dp(arguments))

    def update_supervised(self, batch: SequenceBatch, loss_weights: Floats) -> Future[UpdateMetrics]:
        """Take one optimizer step on the weighted negative log-likelihood."""
        rows = self._rows(batch)
        return self._train_step(
            "update_supervised", scatter_dp([(batch.select(part), loss_weights[part]) for part in rows])
        )

    def connect_sync(
        self, rendezvous: Rendezvous, parts: Sequence[Plan], *, verify: bool, timeout_s: float
    ) -> Future[None]:
        """Connect every rank to its part of a plan, while the rollout workers connect to theirs."""
        arguments = per_rank([(rendezvous, part, verify) for part in parts])
        return self._group.call("connect_sync", arguments, _nothing, phase="connect_sync", timeout_s=timeout_s)

    def send_weights(self, version: int, timeout_s: float) -> Future[list[TransferReport]]:
        """Send all weights as `version`; the answer is one report per rank."""
        return self._group.call(
            "send_weights", broadcast(version, inner_s(timeout_s)), list, phase="send_weights", timeout_s=timeout_s
        )

    def save_checkpoint(self, folder: Path) -> Future[None]:
        """Write an HF checkpoint; every rank writes its share."""
        return self._group.call(
            "save_checkpoint",
            broadcast(folder),
            _nothing,
            phase="save_checkpoint",
            timeout_s=self._timeouts.train_timeout_s,
        )

    def begin_save(self, folder: Path) -> Future[None]:
        """Copy the training state of every rank into host memory; the ranks go on while they write it into `folder`."""
        return self._group.call(
            "begin_save", broadcast(folder), _nothing, phase="begin_save", timeout_s=self._timeouts.train_timeout_s
        )

    def poll_save(self, wait_s: float) -> Future[RoleSave]:
        """Return how the save that was begun last stands, after at most `wait_s` seconds."""
        return self._group.call(
            "poll_save",
            broadcast(wait_s),
            _role_save,
            phase="poll_save",
            timeout_s=wait_s + self._timeouts.train_timeout_s,
        )

    def damage_of(self, folder: Path, files: Mapping[str, FileRecord]) -> Future[list[str]]:
        """Read all files of a checkpoint, each rank a share, and return what is wrong with them."""
        names = sorted(files, key=lambda name: -files[name].num_bytes)
        num_ranks = len(self._group.ranks)
        shares = [{name: files[name] for name in names[rank::num_ranks]} for rank in range(num_ranks)]
        return self._group.call(
            "damage_of",
            per_rank([(folder, share) for share in shares]),
            lambda found: [damage for of_rank in found for damage in of_rank],
            phase="damage_of",
            timeout_s=self._timeouts.startup_timeout_s,
        )

    def load_state(self, paths: Sequence[Path]) -> Future[None]:
        """Take over the training state that ranks of any layout wrote."""
        return self._group.call(
            "load_state", broadcast(paths), _nothing, phase="load_state", timeout_s=self._timeouts.startup_timeout_s
        )

    def close(self) -> None:
        """End all ranks."""
        self._group.kill()

    def _rows(self, batch: SequenceBatch) -> list[NDArray[np.int64]]:
        return rows_of_dp_ranks(self._cost(batch.lengths), self._dp_size)

    def _logprobs(self, method: str, batch: SequenceBatch) -> Future[TokenLogprobs]:
        rows = self._rows(batch)

        def combine(values: list[Any]) -> TokenLogprobs:
            parts = from_reporting_ranks(values, self._group.dp_ranks)
            logprobs, entropies = ([getattr(part, name) for part in parts] for name in ("logprobs", "entropies"))
            routing = None if parts[0].routing is None else join_rows([part.routing for part in parts], rows)
            return TokenLogprobs(join_rows(logprobs, rows), join_rows(entropies, rows), routing)

        arguments = scatter_dp([(batch.select(part), self._temperature) for part in rows])
        return self._group.call(method, arguments, combine, phase=method, timeout_s=self._timeouts.train_timeout_s)

    def _train_step(self, method: str, arguments: Dispatch) -> Future[UpdateMetrics]:
        def combine(values: list[Any]) -> UpdateMetrics:
            metrics: UpdateMetrics = from_reporting_ranks(values, self._group.dp_ranks)[0]
            return metrics

        return self._group.call(method, arguments, combine, phase=method, timeout_s=self._timeouts.train_timeout_s)


def _role_save(saves: list[RankSave]) -> RoleSave:
    files = {rank_file(ROLE, rank): save.record for rank, save in enumerate(saves) if save.record}
    errors = tuple(f"{ROLE} rank {rank}: {save.error}" for rank, save in enumerate(saves) if save.error)
    return RoleSave(all(save.is_done for save in saves), files, errors)


def _first(values: list[Any]) -> Any:
    return values[0]


def _nothing(values: list[Any]) -> None:
    return None
