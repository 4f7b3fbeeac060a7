"""What the Megatron ranks of a pool need to start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hybridrl.config.choices import Platform, Precision, Recompute
from hybridrl.config.schema import MicroBatchConfig, MoeConfig, OptimizerConfig, ParallelConfig
from hybridrl.engines.profiler import ProfileLaunch
from hybridrl.layout.roles import ModelRole


@dataclass(frozen=True, slots=True)
class ModelLaunch:
    """One model on the ranks of a pool.

    Attributes:
        folder: HF checkpoint to start from.
        is_pretrained: Whether to load its weights; otherwise they are drawn from the seed.
        optimizer: None for a frozen model.
        num_optimizer_steps: Steps of the whole run.
        replays_routing: Whether updates take recorded experts.
    """

    role: ModelRole
    folder: Path
    is_pretrained: bool
    micro_batch: MicroBatchConfig
    optimizer: OptimizerConfig | None = None
    num_optimizer_steps: int = 0
    recompute: Recompute = Recompute.NONE
    moe: MoeConfig = field(default_factory=MoeConfig)
    replays_routing: bool = False


@dataclass(frozen=True, slots=True)
class MegatronLaunch:
    """The ranks of a pool and the models that they hold, all in one layout: Megatron-core keeps one per process.

    Attributes:
        timeout_s: Bound on every collective.
        models: At most one of each role.
        session: Of the run's heartbeats.
        profile: What is profiled; None profiles nothing.
    """

    parallel: ParallelConfig
    precision: Precision
    platform: Platform
    threads_per_rank: int
    seed: int
    timeout_s: float
    models: tuple[ModelLaunch, ...]
    session: str = ""
    profile: ProfileLaunch | None = None

    @property
    def roles(self) -> str:
        """The roles, as errors name the ranks that they share."""
        return "+".join(model.role.value for model in self.models)

    def python(self, rank: int) -> str | None:
        """Return the command that runs Python for a rank; None for the usual one."""
        profiled = [
            model.role.value for model in self.models if self.profile and self.profile.covers(model.role.value, rank)
        ]
        return self.profile.python(f"{'+'.join(profiled)}_rank_{rank:05d}") if self.profile and profiled else None
