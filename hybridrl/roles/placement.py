"""Which bundle of resources each process gets: arithmetic on plain data, no cluster needed.

    cpu     a bundle per Megatron rank of the pool, then one per replica
    cuda    the same, but a pool of both has a bundle per device, shared half and half by a rank and a replica

Logical CPUs only count processes; they say nothing about cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridrl.config.choices import Platform
from hybridrl.errors import EngineError

Bundle = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one process runs and what it takes of its bundle.

    Attributes:
        bundle: Index of the bundle in its pool.
    """

    bundle: int
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True)
class PoolPlacement:
    """One pool and the slots of its processes.

    Attributes:
        ranks: One slot per Megatron rank.
        replicas: One slot per rollout replica.
    """

    bundles: tuple[Bundle, ...]
    ranks: tuple[Slot, ...]
    replicas: tuple[Slot, ...]

    @property
    def num_cpus(self) -> int:
        """Logical CPUs of the pool."""
        return int(sum(bundle["CPU"] for bundle in self.bundles))


def place_pool(platform: Platform, num_ranks: int, num_replicas: int, rollout_tp: int) -> PoolPlacement:
    """Lay out the processes of one pool.

    Raises:
        EngineError: For replicas over several devices that share them with Megatron ranks on cuda.
    """
    gpus = 0 if platform is Platform.CPU else 1
    ranks, replicas = range(num_ranks), range(num_replicas)
    if gpus and num_ranks and num_replicas:
        if rollout_tp > 1:
            raise EngineError(
                f"placement.rollout: rollout.tp_size {rollout_tp} on cuda in a pool with Megatron ranks: a replica over several "
                "devices cannot share them with training ranks yet; give placement.rollout a pool of its own, or set "
                "rollout.tp_size to 1"
            )
        shared: Bundle = {"CPU": 2, "GPU": 1}
        slots = tuple(Slot(bundle, 1, 0.5) for bundle in range(max(num_ranks, num_replicas)))
        return PoolPlacement((shared,) * len(slots), slots[:num_ranks], slots[:num_replicas])
    of_rank: Bundle = {"CPU": 1} if not gpus else {"CPU": 1, "GPU": 1}
    of_replica: Bundle = {"CPU": rollout_tp} if not gpus else {"CPU": rollout_tp, "GPU": rollout_tp}
    return PoolPlacement(
        (of_rank,) * num_ranks + (of_replica,) * num_replicas,
        tuple(Slot(rank, 1, gpus) for rank in ranks),
        tuple(Slot(num_ranks + replica, rollout_tp, gpus * rollout_tp) for replica in replicas),
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
