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

from hybridrl.config.choices import TaskName
from hybridrl.config.schema import ExperimentConfig, MicroBatchConfig, ParallelConfig, RoleConfig
from hybridrl.layout.parallel import role_parallel


class ModelRole(enum.Enum):
    """What a Megatron model is there for; errors name it."""

    ACTOR = "actor"
    REFERENCE = "reference"
    CRITIC = "critic"
    REWARD_MODEL = "reward_model"

    @property
    def has_values(self) -> bool:
        """Whether the model has a value head instead of the vocabulary."""
        return self in (ModelRole.CRITIC, ModelRole.REWARD_MODEL)


@dataclass(frozen=True, slots=True)
class PlacedRole:
    """A role of a run.

    Attributes:
        section: Of the configuration, e.g. ``critic``.
        folder_key: Key that names its checkpoint.
        own: Its section; None of the actor.
        pool: Name of its pool.
        folder: Checkpoint to start from.
    """

    role: ModelRole
    section: str
    folder_key: str
    own: RoleConfig | None
    pool: str
    folder: Path
    parallel: ParallelConfig
    micro_batch: MicroBatchConfig


def megatron_roles(config: ExperimentConfig) -> list[PlacedRole]:
    """Return the roles that the algorithm and the reward bring in, the actor first."""
    placement, actor, critic, reward = config.placement, config.actor, config.critic, config.reward.model
    policy = config.model.path

    def beside(role: ModelRole, section: str, own: RoleConfig, folder_key: str, folder: str | None) -> PlacedRole:
        tokens = own.micro_batch_tokens or actor.micro_batch.tokens
        return PlacedRole(
            role,
            section,
            folder_key,
            own,
            getattr(placement, role.value),
            Path(folder if folder is not None else policy),
            role_parallel(own.parallel, actor.parallel),
            replace(actor.micro_batch, tokens=tokens),
        )

    roles = [
        PlacedRole(
            ModelRole.ACTOR,
            "actor",
            "model.path",
            None,
            placement.actor,
            Path(policy),
            actor.parallel,
            actor.micro_batch,
        )
    ]
    if config.algorithm.needs_reference:
        roles.append(beside(ModelRole.REFERENCE, "reference", config.reference, "model.path", policy))
    if config.algorithm.needs_values:
        roles.append(beside(ModelRole.CRITIC, "critic", critic, "critic.model_path", critic.model_path))
    if config.data.task is TaskName.FILE and reward.weight > 0 and reward.path is not None:
        roles.append(beside(ModelRole.REWARD_MODEL, "reward.model", reward, "reward.model.path", reward.path))
    return roles


def by_pool(roles: Sequence[PlacedRole]) -> dict[str, list[PlacedRole]]:
    """Return the roles of each pool."""
    pools: dict[str, list[PlacedRole]] = {}
    for placed in roles:
        pools.setdefault(placed.pool, []).append(placed)
    return pools
