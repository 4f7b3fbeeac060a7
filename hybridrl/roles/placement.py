"""Which bundle of resources each process gets: arithmetic on plain data, no cluster needed.

    cpu, colocated    one pool: a bundle per training rank, then a bundle per replica
    cuda, colocated   one pool: a bundle per device, shared half and half by a training rank and a replica
    split             a pool per role

Logical CPUs only count processes; they say nothing about cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridrl.config.schema import Placement, Platform
from hybridrl.errors import EngineError

Bundle = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one process runs and what it takes of its bundle.

    Attributes:
        pool: Index of the pool.
        bundle: Index of the bundle in the pool.
    """

    pool: int
    bundle: int
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """The pools of a run and the slots of its processes.

    Attributes:
        pools: Bundles of each pool.
        actor: One slot per training rank.
        rollout: One slot per replica.
    """

    pools: tuple[tuple[Bundle, ...], ...]
    actor: tuple[Slot, ...]
    rollout: tuple[Slot, ...]

    @property
    def num_cpus(self) -> int:
        """Logical CPUs of all pools."""
        return int(sum(bundle["CPU"] for pool in self.pools for bundle in pool))


def place_roles(
    platform: Platform, placement: Placement, num_ranks: int, num_replicas: int, rollout_tp: int
) -> RolePlacement:
    """Lay out training ranks and replicas.

    Raises:
        EngineError: For replicas over several devices that are colocated with training ranks on cuda.
    """
    gpus = 0 if platform is Platform.CPU else 1
    rank_bundle: Bundle = {"CPU": 1} if not gpus else {"CPU": 1, "GPU": 1}
    replica_bundle: Bundle = {"CPU": rollout_tp} if not gpus else {"CPU": rollout_tp, "GPU": rollout_tp}
    ranks, replicas = range(num_ranks), range(num_replicas)
    if placement is Placement.SPLIT or not gpus:
        rollout_pool = 1 if placement is Placement.SPLIT else 0
        first = 0 if placement is Placement.SPLIT else num_ranks
        own = ((rank_bundle,) * num_ranks, (replica_bundle,) * num_replicas)
        return RolePlacement(
            own if placement is Placement.SPLIT else (own[0] + own[1],),
            tuple(Slot(0, rank, 1, gpus) for rank in ranks),
            tuple(Slot(rollout_pool, first + replica, rollout_tp, gpus * rollout_tp) for replica in replicas),
        )
    if rollout_tp > 1:
        raise EngineError(
            f"placement: colocated with rollout.tp_size {rollout_tp} on cuda: a replica over several devices cannot share "
            "them with training ranks yet; use placement: split, or rollout.tp_size 1"
        )
    shared: Bundle = {"CPU": 2, "GPU": 1}
    return RolePlacement(
        ((shared,) * max(num_ranks, num_replicas),),
        tuple(Slot(0, rank, 1, 0.5) for rank in ranks),
        tuple(Slot(0, replica, 1, 0.5) for replica in replicas),
    )


def in_node_order(bundles: Sequence[Bundle], nodes: Sequence[str]) -> list[int]:
    """Return, per bundle that was asked for, the granted bundle to use, so that consecutive ranks share a node.

    Bundles of equal content change places with each other and with no others. Example: four equal bundles that were
    granted on nodes a, b, a, b are used in the order 0, 2, 1, 3.

    Args:
        bundles: What was asked for.
        nodes: Where each one was granted.
    """
    order = list(range(len(bundles)))
    for content in bundles:
        equal = [index for index, bundle in enumerate(bundles) if bundle == content]
        for index, granted in zip(equal, sorted(equal, key=lambda index: (nodes[index], index)), strict=True):
            order[index] = granted
    return order
