"""Models with a value head on Megatron ranks as the controller sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridrl.data.batch import Floats, SequenceBatch, ValueBatch
from hybridrl.layout.cost import SequenceCost
from hybridrl.layout.roles import ModelRole
from hybridrl.roles.dispatch import from_reporting_ranks, join_rows
from hybridrl.roles.future import Future
from hybridrl.roles.megatron_pool import MegatronPool, ModelGroup

if TYPE_CHECKING:
    from hybridrl.engines.megatron.results import ValueMetrics


class _ValueGroup(ModelGroup):
    def _by_row(self, method: str, batch: SequenceBatch) -> Future[Floats]:
        """Run a forward pass; the answer is in the order of the rows."""
        rows = self._rows(batch)

        def combine(values: list[Any]) -> Floats:
            return join_rows(from_reporting_ranks(values, self._group.dp_ranks), rows)

        return self._scatter(method, [(batch.select(part),) for part in rows], combine, phase=method)


class MegatronRewardModel(_ValueGroup):
    """A frozen model that scores whole sequences."""

    def __init__(self, pool: MegatronPool, cost: SequenceCost) -> None:
        super().__init__(pool, ModelRole.REWARD_MODEL, cost)

    def rewards(self, batch: SequenceBatch) -> Future[Floats]:
        """Compute the value after the last token of each row, [num_samples]."""
        return self._by_row("rewards", batch)


class MegatronCritic(_ValueGroup):
    """The critic.

    Args:
        clip_value: How far a value may move from that before the update with a gradient; None does not clip.
    """

    def __init__(self, pool: MegatronPool, cost: SequenceCost, *, clip_value: float | None) -> None:
        super().__init__(pool, ModelRole.CRITIC, cost)
        self._clip_value = clip_value

    def values(self, batch: SequenceBatch) -> Future[Floats]:
        """Compute the value of the state after every token, [num_samples, max_tokens]."""
        return self._by_row("values", batch)

    def update(self, batch: ValueBatch) -> Future[ValueMetrics]:
        """Take one optimizer step on the clipped value loss."""

        def combine(values: list[Any]) -> ValueMetrics:
            metrics: ValueMetrics = from_reporting_ranks(values, self._group.dp_ranks)[0]
            return metrics

        arguments = [(batch.select(part), self._clip_value) for part in self._rows(batch.sequences)]
        return self._scatter("update_values", arguments, combine, phase="update_values")
