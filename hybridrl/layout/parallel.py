"""Parallel degrees and the coordinates of a rank in Megatron-core's rank order (tp-cp-ep-dp-pp).

Dense and expert layers have grids of their own over the same world: dense ``tp x cp x dp x pp`` and expert
``etp x ep x edp x pp``, both with the first axis fastest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hybridrl.config.schema import ParallelConfig, RoleParallelConfig


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Degrees of parallelism of one training role.

    Worked example: tp 2, pp 2, ep 2, etp 1, dp 1 is a world of 4 ranks; the two ranks of a pipeline stage are one
    tensor-parallel group for dense layers and one expert-parallel group for experts, so edp is 1.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Replicas of each expert shard."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank` in [0, world_size)."""
        assert 0 <= rank < self.world_size, (rank, self)
        per_stage = self.tp * self.cp * self.dp
        inner = rank % per_stage
        return Coordinates(
            tp=inner % self.tp,
            cp=inner // self.tp % self.cp,
            dp=inner // (self.tp * self.cp),
            pp=rank // per_stage,
            etp=inner % self.etp,
            ep=inner // self.etp % self.ep,
            edp=inner // (self.etp * self.ep),
        )


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Position of one rank on every axis."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


def sequence_alignment(config: ParallelConfig) -> int:
    """Return the number that the tokens of each sequence are a multiple of: two chunks for each context-parallel rank."""
    return 2 * config.cp_size if config.cp_size > 1 else 1


def alignment(config: ParallelConfig) -> int:
    """Return the number that the tokens of a micro-batch are a multiple of.

    Besides :func:`sequence_alignment`, sequence parallelism cuts the tokens of each context-parallel rank into tp equal parts.
    """
    is_cut = config.sequence_parallel and config.tp_size > 1
    return math.lcm(sequence_alignment(config), config.cp_size * (config.tp_size if is_cut else 1))


def role_parallel(role: RoleParallelConfig, actor: ParallelConfig) -> ParallelConfig:
    """Return the degrees of a role beside the actor: its own, and the actor's where it has none.

    Worked example: the actor has tp 2, pp 2 and two chunks per rank. A critic with tp_size 1 has tp 1, pp 2 and two chunks; one
    with pp_size 1 has tp 2, pp 1 and one chunk.
    """
    names = ("tp_size", "pp_size", "ep_size", "etp_size", "cp_size", "dp_size")
    own = {name: degree for name in names if (degree := getattr(role, name)) is not None}
    if role.pp_size is None:
        return replace(actor, **own)
    return replace(
        actor,
        **own,
        vpp_size=1,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        pipeline_layout=role.pipeline_layout,
    )


def parallel_sizes(config: ParallelConfig) -> ParallelSizes:
    """Return the configured degrees in the layout language."""
    return ParallelSizes(
        config.tp_size, config.pp_size, config.ep_size, config.etp_size, config.cp_size, config.dp_size
    )
