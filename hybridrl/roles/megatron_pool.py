"""The Megatron ranks of one pool, and each model on them as a group of its own.

Roles of one pool share its processes. Calls of one role and of another run in the order in which they were made; those of roles in
different pools run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.schema import TrainerConfig
from hybridrl.data.batch import SequenceBatch
from hybridrl.layout.cost import SequenceCost
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.roles import ModelRole
from hybridrl.roles.dispatch import broadcast, rows_of_dp_ranks, scatter_dp
from hybridrl.roles.future import Future, wait_for
from hybridrl.roles.group import Calls, RoleGroup
from hybridrl.roles.megatron_launch import MegatronLaunch
from hybridrl.roles.megatron_worker import MegatronWorker
from hybridrl.roles.placement import Slot
from hybridrl.roles.resources import ResourcePool

T = TypeVar("T")


class MegatronPool:
    """All ranks of a pool.

    Args:
        slots: One per rank.
        timeouts: Bounds on start, forward passes and updates.
        calls: Of the run.
    """

    def __init__(
        self,
        pool: ResourcePool,
        slots: Sequence[Slot],
        launch: MegatronLaunch,
        *,
        timeouts: TrainerConfig,
        calls: Calls | None = None,
    ) -> None:
        sizes = parallel_sizes(launch.parallel)
        assert len(slots) == sizes.world_size, (len(slots), sizes)
        self.timeouts = timeouts
        self.dp_size = sizes.dp
        self._dp_ranks = [sizes.coordinates(rank).dp for rank in range(sizes.world_size)]
        self._actors = [
            pool.start_actor(MegatronWorker, slot, rank, launch, python=launch.python(rank))
            for rank, slot in enumerate(slots)
        ]
        self._calls = calls
        self._group = RoleGroup(launch.roles, self._actors, self._dp_ranks, calls=calls)

    def rendezvous(self) -> tuple[str, int]:
        """Return the address of rank 0's host and a free port there."""
        first: Future[tuple[str, int]] = self._group.call(
            "rendezvous", broadcast(), _first, phase="rendezvous", timeout_s=self.timeouts.startup_timeout_s
        )
        return wait_for(first)

    def start(self) -> Future[None]:
        """Start all ranks and load the weights of their models."""
        return self._group.call(
            "start", broadcast(*self.rendezvous()), nothing, phase="start", timeout_s=self.timeouts.startup_timeout_s
        )

    def group(self, role: ModelRole) -> RoleGroup:
        """Return the ranks under the name of one of their roles."""
        return RoleGroup(role.value, self._actors, self._dp_ranks, calls=self._calls)

    def begin_profile(self, step: int) -> Future[None]:
        """Profile the calls of a step on the ranks that are profiled."""
        timeout_s = self.timeouts.train_timeout_s
        return self._group.call("begin_profile", broadcast(step), nothing, phase="begin_profile", timeout_s=timeout_s)

    def end_profile(self) -> Future[None]:
        """Profile no more calls."""
        timeout_s = self.timeouts.train_timeout_s
        return self._group.call("end_profile", broadcast(), nothing, phase="end_profile", timeout_s=timeout_s)

    def close(self) -> None:
        """End all ranks."""
        self._group.kill()


class ModelGroup:
    """One model on the ranks of a pool: deals the rows of a batch out to data-parallel ranks.

    Args:
        cost: Of sequences, for balancing data-parallel ranks.
    """

    def __init__(self, pool: MegatronPool, role: ModelRole, cost: SequenceCost) -> None:
        self._pool = pool
        self._role = role
        self._group = pool.group(role)
        self._cost = cost

    def _rows(self, batch: SequenceBatch) -> list[NDArray[np.int64]]:
        return rows_of_dp_ranks(self._cost(batch.lengths), self._pool.dp_size)

    def _scatter(
        self, method: str, arguments: Sequence[tuple[Any, ...]], combine: Callable[[list[Any]], T], *, phase: str
    ) -> Future[T]:
        """Call a method with the arguments of each data-parallel rank."""
        timeout_s = self._pool.timeouts.train_timeout_s
        return self._group.call(method, scatter_dp(arguments), combine, phase=phase, timeout_s=timeout_s)


def _first(values: list[Any]) -> Any:
    return values[0]


def nothing(values: list[Any]) -> None:
    """Combine answers that say no more than that a call ended."""
    return
