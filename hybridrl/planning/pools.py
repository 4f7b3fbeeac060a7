"""The devices of a run: pools in the order of their roles, the actor's first, one device after the other through the nodes."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.choices import Platform
from hybridrl.config.schema import ExperimentConfig
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.roles import ModelRole, PlacedRole, by_pool, megatron_roles


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that some roles run on.

    Attributes:
        roles: Megatron roles, which share the ranks and their layout.
        num_workers: Of all rollout replicas, in the pool that has them.
        is_shared: Whether a rank and a worker use the same device. On a CPU each has memory of its own.
        first: Its first device, counted through all pools.
    """

    name: str
    roles: tuple[PlacedRole, ...]
    num_ranks: int
    num_workers: int
    is_shared: bool
    first: int

    @property
    def num_devices(self) -> int:
        """Devices of the pool; on a CPU a rank or worker stands for one."""
        return max(self.num_ranks, self.num_workers) if self.is_shared else self.num_ranks + self.num_workers

    @property
    def first_worker(self) -> int:
        """Device of the first rollout worker."""
        return self.first if self.is_shared else self.first + self.num_ranks


def run_pools(config: ExperimentConfig) -> tuple[Pool, ...]:
    """Return the pools of a run."""
    members, rollout = by_pool(megatron_roles(config)), config.placement.rollout
    num_workers, pools, first = config.rollout.num_replicas * config.rollout.tp_size, list[Pool](), 0
    for name in dict.fromkeys([*members, rollout]):
        roles = tuple(members.get(name, ()))
        ranks = parallel_sizes(roles[0].parallel).world_size if roles else 0
        workers = num_workers if name == rollout else 0
        is_shared = config.platform is Platform.CUDA and ranks > 0 and workers > 0
        pools.append(Pool(name, roles, ranks, workers, is_shared, first))
        first += pools[-1].num_devices
    return tuple(pools)


def pool_of_actor(config: ExperimentConfig) -> Pool:
    """Return the pool that has the actor."""
    return next(pool for pool in run_pools(config) if any(placed.role is ModelRole.ACTOR for placed in pool.roles))


def pool_of_rollout(config: ExperimentConfig) -> Pool:
    """Return the pool that has the replicas."""
    return next(pool for pool in run_pools(config) if pool.num_workers)


def count_devices(config: ExperimentConfig) -> int:
    """Return the devices that a run takes."""
    return sum(pool.num_devices for pool in run_pools(config))
