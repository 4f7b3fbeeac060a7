"""The Megatron roles of an experiment: which there are, in which pool each runs, and in which layout.

Roles of one pool share its processes, and Megatron-core keeps one layout per process (``parallel_state``): in one pool all roles have
the same degrees. Example: an actor with tp 2 and a critic of the same pool are two models on two ranks; with a critic of tp 1 in a
pool of its own they are three ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hybridrl.config.schema import ExperimentConfig, MicroBatchConfig, ParallelConfig, RoleConfig
from hybridrl.layout.parallel import role_parallel


class ModelRole(enum.Enum):
    """What a Megatron model is there for; errors name it."""

    ACTOR = "actor"
    REFERENCE = "reference"
    CRITIC = "critic"

    @property
    def has_values(self) -> bool:
        """Whether the model has a value head instead of the vocabulary."""
        return self is ModelRole.CRITIC


@dataclass(frozen=True, slots=True)
class PlacedRole:
    """A role of a run.

    Attributes:
        section: Of the configuration, e.g. ``critic``.
        pool: Name of its pool.
        folder: Checkpoint to start from.
    """

    role: ModelRole
    section: str
    pool: str
    folder: Path
    parallel: ParallelConfig
    micro_batch: MicroBatchConfig


def megatron_roles(config: ExperimentConfig) -> list[PlacedRole]:
    """Return the roles that the algorithm and the reward bring in, the actor first."""
    placement, actor, model = config.placement, config.actor, Path(config.model.path)
    roles = [PlacedRole(ModelRole.ACTOR, "actor", placement.actor, model, actor.parallel, actor.micro_batch)]
    if config.algorithm.needs_reference:
        roles.append(_beside(config, ModelRole.REFERENCE, "reference", placement.reference, config.reference, model))
    if config.algorithm.needs_values:
        folder = Path(config.critic.model_path) if config.critic.model_path is not None else model
        roles.append(_beside(config, ModelRole.CRITIC, "critic", placement.critic, config.critic, folder))
    return roles


def by_pool(roles: Sequence[PlacedRole]) -> dict[str, list[PlacedRole]]:
    """Return the roles of each pool."""
    pools: dict[str, list[PlacedRole]] = {}
    for placed in roles:
        pools.setdefault(placed.pool, []).append(placed)
    return pools


def _beside(
    config: ExperimentConfig, role: ModelRole, section: str, pool: str, own: RoleConfig, folder: Path
) -> PlacedRole:
    actor = config.actor
    tokens = own.micro_batch_tokens or actor.micro_batch.tokens
    parallel = role_parallel(own.parallel, actor.parallel)
    return PlacedRole(role, section, pool, folder, parallel, replace(actor.micro_batch, tokens=tokens))
