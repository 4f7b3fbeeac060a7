"""Everything that can be known to be wrong before anything starts, found in one go.

    YAML and overrides -> Draft (faults of single keys) -> platform, model, roles, batches, sampling, inputs, optimizer, modes -> ConfigError with all of them

Nothing here imports an engine: a faulty configuration is refused in well under a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.load import Draft, read_draft
from hybridrl.config.schema import ExperimentConfig, ParallelConfig
from hybridrl.errors import ConfigError
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.roles import by_pool, megatron_roles
from hybridrl.preflight.algorithm import check_algorithm
from hybridrl.preflight.batch import BatchArithmetic, check_batch, check_tokens
from hybridrl.preflight.command import Command
from hybridrl.preflight.inputs import check_inputs
from hybridrl.preflight.model import check_model
from hybridrl.preflight.modes import check_modes
from hybridrl.preflight.optimizer import check_optimizer
from hybridrl.preflight.platform import check_platform
from hybridrl.preflight.profile import check_profile
from hybridrl.preflight.report import Report
from hybridrl.preflight.roles import check_roles
from hybridrl.preflight.sampling import check_sampling


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration without known problems, and what follows from it.

    Attributes:
        needs: What keeps it from running here although it can be planned; empty unless it was checked for that alone.
    """

    config: ExperimentConfig
    command: Command
    spec: ModelSpec
    batch: BatchArithmetic
    needs: tuple[str, ...] = ()

    def summary(self) -> str:
        """Describe the run in a few lines: model, ranks and batch arithmetic."""
        config, spec = self.config, self.spec
        num_parameters = sum(math.prod(tensor.shape) for tensor in spec.tensors().values())
        lines = [
            f"{config.name}: ready for hybridrl {self.command.value}",
            f"  model    {spec.family}, {len(spec.layers)} layers, {num_parameters:,} parameters",
        ]
        roles = megatron_roles(config) if self.command is Command.TRAIN else megatron_roles(config)[:1]
        for members in by_pool(roles).values():
            names = ", ".join(member.role.value for member in members)
            lines.append(f"  {names:<8} {_ranks(members[0].parallel)}")
        if self.command is Command.TRAIN:
            lines.append(f"  rollout  {config.rollout.num_replicas} vLLM replica(s), tp {config.rollout.tp_size}")
        return "\n".join([*lines, f"  batch    {self.batch}"])


def _ranks(parallel: ParallelConfig) -> str:
    degrees = (
        "tp {0.tp_size} x pp {0.pp_size} x cp {0.cp_size} x dp {0.dp_size}, experts ep {0.ep_size} x etp {0.etp_size}"
    )
    return f"{parallel_sizes(parallel).world_size} rank(s): {degrees.format(parallel)}"


def load_checked(path: Path, overrides: Sequence[str], command: Command) -> Checked:
    """Load and check a configuration.

    Raises:
        ConfigError: Listing every problem, each with its place.
    """
    return check_draft(read_draft(path, overrides), command)


def load_planned(path: Path, overrides: Sequence[str]) -> Checked:
    """Load and check a configuration that is to be planned and not run: its files, packages and hardware need not be here.

    Raises:
        ConfigError: Listing every problem, what a run would need included.
    """
    return check_draft(read_draft(path, overrides), Command.TRAIN, is_plan=True)


def check_draft(draft: Draft, command: Command, *, is_plan: bool = False) -> Checked:
    """Check what no key can be checked for alone.

    Args:
        is_plan: Whether what only a run needs is noted instead of refused.

    Raises:
        ConfigError: Listing the problems of the draft and those found here.
    """
    config, report = draft.config, Report(draft)
    check_platform(report, config, command)
    spec = check_model(report, config, command)
    check_roles(report, config, command, spec)
    batch = check_batch(report, config, command)
    if command is Command.TRAIN:
        check_tokens(report, config)
        check_sampling(report, config)
        check_algorithm(report, config)
        check_profile(report, config)
    check_inputs(report, config, command)
    check_optimizer(report, config, command)
    check_modes(report, config, command)
    problems = [*draft.problems, *report.problems]
    if len(problems) > (len(report.needs) if is_plan else 0):
        raise ConfigError(problems)
    assert spec is not None, "a model that could not be read is a problem"
    return Checked(config, command, spec, batch, tuple(report.needs))
