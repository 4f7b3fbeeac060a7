"""The training role as the controller sees it: typed calls on all ranks, answers in batch order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
from hybridrl.roles.group import Observe, RoleGroup
from hybridrl.roles.megatron_worker import ROLE, MegatronLaunch, MegatronWorker
from hybridrl.roles.placement import Slot
from hybridrl.roles.resources import ResourcePool

if TYPE_CHECKING:
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

    def observe(self, observe: Observe) -> None:
        """Tell of every answer of a rank from now on."""
        self._group.observe = observe

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

    def update(self, batch: PolicyBatch, *, want_logprobs: bool = False) -> Future[UpdateMetrics]:
        """Take one optimizer step on the policy loss; the answer has the log-probs before it where they are wanted."""
        rows = self._rows(batch.sequences)
        arguments = [(batch.select(part), self._loss, self._temperature, want_logprobs) for part in rows]
        return self._train_step("update", scatter_dp(arguments), rows)

    def update_supervised(self, batch: SequenceBatch, loss_weights: Floats) -> Future[UpdateMetrics]:
        """Take one optimizer step on the weighted negative log-likelihood."""
        rows = self._rows(batch)
        return self._train_step(
            "update_supervised", scatter_dp([(batch.select(part), loss_weights[part]) for part in rows]), rows
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

    def _train_step(self, method: str, arguments: Dispatch, rows: Sequence[NDArray[np.int64]]) -> Future[UpdateMetrics]:
        def combine(values: list[Any]) -> UpdateMetrics:
            parts: list[UpdateMetrics] = from_reporting_ranks(values, self._group.dp_ranks)
            logprobs = [part.logprobs for part in parts if part.logprobs is not None]
            return replace(parts[0], logprobs=join_rows(logprobs, rows)) if logprobs else parts[0]

        return self._group.call(method, arguments, combine, phase=method, timeout_s=self._timeouts.train_timeout_s)


def _first(values: list[Any]) -> Any:
    return values[0]


def _nothing(values: list[Any]) -> None:
    return None
