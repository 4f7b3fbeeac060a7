"""How long the phases of a step take, between a pessimistic and an optimistic figure, and what policy lag makes of them.

    update       tokens F (4/3 with full recomputation) / (ranks peak MFU) / (1 - bubble), of actor and critic
    forward      a third of F per token: log-probs, values, rewards of a model
    rollout      decoding on the roofline (``generation.py``): full waves of running samples, at least the longest one alone
    bubble       (p - 1) / (v m + p - 1), for m micro-batches on p stages of v chunks

Rewards, forward passes and update follow each other. Within each, models of one pool take turns and pools compute at the same time: the
busiest pool counts. Lag 0 takes the sum of the phases. Lag 1 on devices of their own takes the longer of rollout and training, and the weight sync. Other rewards,
evaluations, checkpoints and the exchange of tokens between experts are not in it.

Source: Narayanan et al., arXiv 2104.04473 (bubble).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridrl.config.choices import OldPolicy, Recompute
from hybridrl.config.schema import ExperimentConfig
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.roles import ModelRole, PlacedRole, megatron_roles
from hybridrl.planning.cluster import Cluster
from hybridrl.planning.flops import forward_flops, training_flops
from hybridrl.planning.generation import DecodeStep, Replica, decode_step
from hybridrl.planning.pools import pool_of_rollout
from hybridrl.planning.weight_sync import SyncEstimate
from hybridrl.planning.workload import Workload, workload

# Share of the peak that training of large mixtures reaches in published pre-training runs, bfloat16; half of it pessimistically.
MFU_BAND = (0.15, 0.30)
# Tokens of a rank's micro-batch from which kernels are as efficient as they get; an inference.
_SATURATION_TOKENS = 4096
_RECOMPUTED_UNITS = {Recompute.NONE: 3, Recompute.SELECTIVE: 3, Recompute.FULL: 4}


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration between two figures."""

    low: float
    high: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.low + other.low, self.high + other.high)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The phases of a step.

    Attributes:
        mfu: Expected share of the peak in training the actor, bubble left out.
        bubble: Share of its training in which a stage waits.
        decode: A decoding step at the average context, with all samples running.
        passes: What Megatron's models compute, by name.
        training: How long all of them take, pools beside each other.
        lag_1: Step with rollouts one step ahead; None where devices are shared, since both would contend for them.
        idle_share: Of the pool that waits for the other, with lag 1 at the pessimistic figures.
    """

    training_flops_per_token: float
    forward_flops_per_token: float
    mfu: Seconds
    bubble: float
    decode: DecodeStep
    rollout: Seconds
    passes: Mapping[str, Seconds]
    training: Seconds
    weight_sync: Seconds
    lag_1: Seconds | None
    idle_share: float | None

    @property
    def lag_0(self) -> Seconds:
        """A step whose phases follow each other."""
        return self.rollout + self.training + self.weight_sync


def step_timing(
    config: ExperimentConfig,
    specs: Mapping[ModelRole, ModelSpec],
    cluster: Cluster,
    replica: Replica,
    sync: SyncEstimate,
) -> StepTiming:
    """Return the phases of a step.

    Args:
        specs: Of every Megatron role.
    """
    spec, work = specs[ModelRole.ACTOR], workload(config)
    placed_roles = megatron_roles(config)
    rates = {placed.role: _rate(config, placed, specs[placed.role], cluster) for placed in placed_roles}
    actor, computed = rates[ModelRole.ACTOR], [each for each in _computed(config, work) if each.role in rates]
    passes = {each.name: rates[each.role].passes(each.units) for each in computed}
    training = _training(computed, passes, {placed.role: placed.pool for placed in placed_roles})
    decode, rollout = _rollout(config, spec, cluster, work, replica)
    moved = Seconds(sync.price.lower_bound_seconds, sync.price.seconds)
    lag_1 = idle = None
    if not pool_of_rollout(config).is_shared:
        lag_1 = _longest((rollout, training)) + moved
        idle = abs(rollout.high - training.high) / max(rollout.high, training.high)
    forward, training_per_token = forward_flops(spec, work.sample_tokens), training_flops(spec, work.sample_tokens)
    return StepTiming(
        training_per_token, forward, actor.mfu, actor.bubble, decode, rollout, passes, training, moved, lag_1, idle
    )


class _Stage(enum.Enum):
    """Parts of a step that wait for each other, in their order."""

    REWARDS = enum.auto()
    FORWARD = enum.auto()
    UPDATE = enum.auto()


@dataclass(frozen=True, slots=True)
class _Computed:
    """What one model computes in a stage.

    Attributes:
        units: How many forward passes over all samples that are trained on it costs.
    """

    stage: _Stage
    role: ModelRole
    name: str
    units: float


def _computed(config: ExperimentConfig, work: Workload) -> Iterator[_Computed]:
    """Yield what is computed in a step; rewards also of greedy samples, which are not trained on."""
    update = _RECOMPUTED_UNITS[config.actor.recompute] * config.algorithm.epochs_per_step
    yield _Computed(_Stage.REWARDS, ModelRole.REWARD_MODEL, "rewards", work.num_generated / work.num_samples)
    if config.algorithm.rollout_correction.old_policy is not OldPolicy.BYPASS:
        yield _Computed(_Stage.FORWARD, ModelRole.ACTOR, "old log-probs", 1)
    yield _Computed(_Stage.FORWARD, ModelRole.REFERENCE, "reference log-probs", 1)
    yield _Computed(_Stage.FORWARD, ModelRole.CRITIC, "values", 1)
    yield _Computed(_Stage.UPDATE, ModelRole.CRITIC, "critic update", update)
    yield _Computed(_Stage.UPDATE, ModelRole.ACTOR, "update", update)


def _training(computed: Sequence[_Computed], passes: Mapping[str, Seconds], pools: Mapping[ModelRole, str]) -> Seconds:
    """Return the sum over the stages of the busiest pool of each."""
    busy: dict[_Stage, dict[str, Seconds]] = {}
    for each in computed:
        of_pool, pool = busy.setdefault(each.stage, {}), pools[each.role]
        of_pool[pool] = of_pool.get(pool, Seconds(0.0, 0.0)) + passes[each.name]
    return sum((_longest(of_pool.values()) for of_pool in busy.values()), Seconds(0.0, 0.0))


def _longest(durations: Iterable[Seconds]) -> Seconds:
    low, high = zip(*((each.low, each.high) for each in durations), strict=True)
    return Seconds(max(low), max(high))


@dataclass(frozen=True, slots=True)
class _Rate:
    """How fast the ranks of a role are.

    Attributes:
        forward_seconds: Of a forward pass over all tokens of a step, at the whole peak and without bubble.
    """

    mfu: Seconds
    bubble: float
    forward_seconds: float

    def passes(self, units: float) -> Seconds:
        """Return the seconds of so many forward passes."""
        ideal = units * self.forward_seconds / (1 - self.bubble)
        return Seconds(ideal / self.mfu.high, ideal / self.mfu.low)


def _rate(config: ExperimentConfig, placed: PlacedRole, spec: ModelSpec, cluster: Cluster) -> _Rate:
    parallel, work = placed.parallel, workload(config, placed)
    saturation = min(1.0, work.mean_micro_batch_tokens / parallel.cp_size / _SATURATION_TOKENS)
    waits = parallel.pp_size - 1
    peak = parallel_sizes(parallel).world_size * cluster.peak_tflops * 1e12
    return _Rate(
        Seconds(MFU_BAND[0] * saturation, MFU_BAND[1] * saturation),
        waits / (parallel.vpp_size * work.num_micro_batches + waits),
        work.tokens_per_step * forward_flops(spec, work.sample_tokens) / peak,
    )


def _rollout(
    config: ExperimentConfig, spec: ModelSpec, cluster: Cluster, work: Workload, replica: Replica
) -> tuple[DecodeStep, Seconds]:
    """Return an average decoding step, and the seconds of all samples' prompts and responses."""
    running = max(1, replica.running_samples)
    context = work.prompt_tokens + work.response_tokens // 2
    decode = decode_step(config, spec, cluster, running, context)
    share = -(-work.num_generated // config.rollout.num_replicas)
    num_steps = max(share / running, 1.0) * work.response_tokens
    alone = decode_step(config, spec, cluster, 1, work.prompt_tokens + config.rollout.max_response_tokens // 2)
    peak = config.rollout.tp_size * cluster.peak_tflops * 1e12
    prefill = share * work.prompt_tokens * forward_flops(spec, work.prompt_tokens) / peak
    low, high = (
        max(num_steps * at_average, config.rollout.max_response_tokens * at_end) + prefill / efficiency
        for at_average, at_end, efficiency in zip(
            reversed(decode.seconds), reversed(alone.seconds), (0.5, 0.3), strict=True
        )
    )
    return decode, Seconds(low, high)
