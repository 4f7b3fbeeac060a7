"""Policies on Megatron ranks as the controller sees them: typed calls on all ranks, answers in batch order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.algorithm import PolicyLossConfig
from hybridrl.data.batch import Floats, PolicyBatch, SequenceBatch
from hybridrl.layout.cost import SequenceCost
from hybridrl.layout.roles import ModelRole
from hybridrl.layout.shard import ShardMap
from hybridrl.roles.deadline import inner_s
from hybridrl.roles.dispatch import broadcast, from_reporting_ranks, join_rows, per_rank
from hybridrl.roles.future import Future
from hybridrl.roles.megatron_pool import MegatronPool, ModelGroup, nothing

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


class MegatronPolicy(ModelGroup):
    """A policy that gives log-probs: the reference, or the actor.

    Args:
        temperature: Divides the logits, as in sampling.
    """

    def __init__(self, pool: MegatronPool, role: ModelRole, cost: SequenceCost, *, temperature: float) -> None:
        super().__init__(pool, role, cost)
        self._temperature = temperature

    def logprobs(self, batch: SequenceBatch) -> Future[TokenLogprobs]:
        """Compute the log-probs of all tokens but the first of each row."""
        rows = self._rows(batch)

        def combine(values: list[Any]) -> TokenLogprobs:
            parts = from_reporting_ranks(values, self._group.dp_ranks)
            logprobs, entropies = ([getattr(part, name) for part in parts] for name in ("logprobs", "entropies"))
            routing = None if parts[0].routing is None else join_rows([part.routing for part in parts], rows)
            return TokenLogprobs(join_rows(logprobs, rows), join_rows(entropies, rows), routing)

        arguments = [(self._role, batch.select(part), self._temperature) for part in rows]
        return self._scatter("logprobs", arguments, combine, phase="logprobs")


class MegatronActor(MegatronPolicy):
    """The policy that is trained.

    Args:
        loss: Policy loss of every update.
    """

    def __init__(self, pool: MegatronPool, cost: SequenceCost, *, temperature: float, loss: PolicyLossConfig) -> None:
        super().__init__(pool, ModelRole.ACTOR, cost, temperature=temperature)
        self._loss = loss

    @property
    def dp_size(self) -> int:
        """Data-parallel degree: rows of a batch are dealt out to so many ranks."""
        return self._pool.dp_size

    def rendezvous(self) -> tuple[str, int]:
        """Return the address of rank 0's host and a free port there."""
        return self._pool.rendezvous()

    def shard_maps(self) -> Future[list[ShardMap]]:
        """Return where each rank keeps the weights."""
        timeout_s = self._pool.timeouts.startup_timeout_s
        return self._group.call("shard_map", broadcast(), list, phase="shard_map", timeout_s=timeout_s)

    def update(self, batch: PolicyBatch, *, want_logprobs: bool = False) -> Future[UpdateMetrics]:
        """Take one optimizer step on the policy loss; the answer has the log-probs before it where they are wanted."""
        rows = self._rows(batch.sequences)

        def combine(values: list[Any]) -> UpdateMetrics:
            parts: list[UpdateMetrics] = from_reporting_ranks(values, self._group.dp_ranks)
            logprobs = [part.logprobs for part in parts if part.logprobs is not None]
            return replace(parts[0], logprobs=join_rows(logprobs, rows)) if logprobs else parts[0]

        arguments = [(batch.select(part), self._loss, self._temperature, want_logprobs) for part in rows]
        return self._scatter("update", arguments, combine, phase="update")

    def update_supervised(self, batch: SequenceBatch, loss_weights: Floats) -> Future[UpdateMetrics]:
        """Take one optimizer step on the weighted negative log-likelihood."""
        arguments = [(batch.select(part), loss_weights[part]) for part in self._rows(batch)]
        return self._scatter("update_supervised", arguments, self._metrics, phase="update_supervised")

    def connect_sync(
        self, rendezvous: Rendezvous, parts: Sequence[Plan], *, verify: bool, timeout_s: float
    ) -> Future[None]:
        """Connect every rank to its part of a plan, while the rollout workers connect to theirs."""
        arguments = per_rank([(rendezvous, part, verify) for part in parts])
        return self._group.call("connect_sync", arguments, nothing, phase="connect_sync", timeout_s=timeout_s)

    def send_weights(self, version: int, timeout_s: float) -> Future[list[TransferReport]]:
        """Send all weights as `version`; the answer is one report per rank."""
        return self._group.call(
            "send_weights", broadcast(version, inner_s(timeout_s)), list, phase="send_weights", timeout_s=timeout_s
        )

    def save_checkpoint(self, folder: Path) -> Future[None]:
        """Write an HF checkpoint; every rank writes its share."""
        timeout_s = self._pool.timeouts.train_timeout_s
        return self._group.call(
            "save_checkpoint", broadcast(folder), nothing, phase="save_checkpoint", timeout_s=timeout_s
        )

    def _metrics(self, values: list[Any]) -> UpdateMetrics:
        metrics: UpdateMetrics = from_reporting_ranks(values, self._group.dp_ranks)[0]
        return metrics
