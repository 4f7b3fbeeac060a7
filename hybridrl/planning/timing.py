"""How long the phases of a step take, between a pessimistic and an optimistic figure, and what policy lag makes of them.

    update       tokens F (4/3 with full recomputation) / (ranks peak MFU) / (1 - bubble)
    log-probs    a third of F per token
    rollout      decoding on the roofline (``generation.py``): full waves of running samples, at least the longest one alone
    bubble       (p - 1) / (v m + p - 1), for m micro-batches on p stages of v chunks

Lag 0 takes the sum of the phases. Lag 1 on devices of their own takes the longer of rollout and training, and the weight sync. Rewards,
evaluations, checkpoints and the exchange of tokens between experts are not in it.

Source: Narayanan et al., arXiv 2104.04473 (bubble).
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.schema import ExperimentConfig, OldPolicy, Recompute
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.planning.cluster import Cluster
from hybridrl.planning.flops import forward_flops, training_flops
from hybridrl.planning.generation import DecodeStep, Replica, decode_step
from hybridrl.planning.layouts import are_devices_shared
from hybridrl.planning.weight_sync import SyncEstimate
from hybridrl.planning.workload import Workload

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
        mfu: Expected share of the peak in training, bubble left out.
        bubble: Share of training in which a stage waits.
        decode: A decoding step at the average context, with all samples running.
        lag_1: Step with rollouts one step ahead; None where devices are shared, since both would contend for them.
        idle_share: Of the pool that waits for the other, with lag 1 at the pessimistic figures.
    """

    training_flops_per_token: float
    forward_flops_per_token: float
    mfu: Seconds
    bubble: float
    decode: DecodeStep
    rollout: Seconds
    old_logprobs: Seconds
    ref_logprobs: Seconds
    update: Seconds
    weight_sync: Seconds
    lag_1: Seconds | None
    idle_share: float | None

    @property
    def training(self) -> Seconds:
        """What the training ranks compute in a step."""
        return self.old_logprobs + self.ref_logprobs + self.update

    @property
    def lag_0(self) -> Seconds:
        """A step whose phases follow each other."""
        return self.rollout + self.training + self.weight_sync


def step_timing(
    config: ExperimentConfig, spec: ModelSpec, cluster: Cluster, work: Workload, replica: Replica, sync: SyncEstimate
) -> StepTiming:
    """Return the phases of a step."""
    parallel, algorithm = config.actor.parallel, config.algorithm
    flops = training_flops(spec, work.sample_tokens)
    saturation = min(1.0, work.mean_micro_batch_tokens / parallel.cp_size / _SATURATION_TOKENS)
    mfu = Seconds(MFU_BAND[0] * saturation, MFU_BAND[1] * saturation)
    waits = parallel.pp_size - 1
    bubble = waits / (parallel.vpp_size * work.num_micro_batches + waits)
    forward = forward_flops(spec, work.sample_tokens)
    rate = parallel_sizes(parallel).world_size * cluster.peak_tflops * 1e12 * (1 - bubble) / work.tokens_per_step

    def passes(units: float) -> Seconds:
        return Seconds(units * forward / (rate * mfu.high), units * forward / (rate * mfu.low))

    none = Seconds(0.0, 0.0)
    is_bypassed = algorithm.rollout_correction.old_policy is OldPolicy.BYPASS
    decode, rollout = _rollout(config, spec, cluster, work, replica)
    old, ref = (none if is_bypassed else passes(1)), (passes(1) if algorithm.needs_reference else none)
    update = passes(_RECOMPUTED_UNITS[config.actor.recompute])
    moved = Seconds(sync.price.lower_bound_seconds, sync.price.seconds)
    lag_1 = idle = None
    if not are_devices_shared(config):
        training = old + ref + update
        lag_1 = Seconds(max(rollout.low, training.low), max(rollout.high, training.high)) + moved
        idle = abs(rollout.high - training.high) / max(rollout.high, training.high)
    return StepTiming(flops, forward, mfu, bubble, decode, rollout, old, ref, update, moved, lag_1, idle)


def _rollout(
    config: ExperimentConfig, spec: ModelSpec, cluster: Cluster, work: Workload, replica: Replica
) -> tuple[DecodeStep, Seconds]:
    """Return an average decoding step, and the seconds of all samples' prompts and responses."""
    running = max(1, replica.running_samples)
    context = work.prompt_tokens + work.response_tokens // 2
    decode = decode_step(config, spec, cluster, running, context)
    share = -(-work.num_samples // config.rollout.num_replicas)
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
