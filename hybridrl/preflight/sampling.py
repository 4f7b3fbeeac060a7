"""Can sampler and trainer agree as closely as the configuration demands, and has every replica a seed?"""

from __future__ import annotations

from hybridrl.config.schema import ExperimentConfig
from hybridrl.preflight.report import Report

MAX_SEED = 2**32 - 1
# What rounding weights and activations to bfloat16 on one side alone does to log-probs.
MIXED_PRECISION_GAP = 0.05
_GAP = "trainer.max_logprob_gap"


def check_sampling(report: Report, config: ExperimentConfig) -> None:
    """Check the bound on the log-prob gap against what opens it, and the seeds of the replicas."""
    rollout, gap = config.rollout, config.trainer.max_logprob_gap
    if gap is not None and rollout.top_p < 1:
        expected = f"1, since {_GAP} is set: the sampler's log-probs are those of the nucleus, the trainer's are not"
        report.add("rollout.top_p", rollout.top_p, expected, f"set it to 1 or {_GAP} to null", related=(_GAP,))
    training, sampling = config.model.precision, rollout.precision
    if gap is not None and gap < MIXED_PRECISION_GAP and training is not sampling:
        expected = (
            f"at least {MIXED_PRECISION_GAP:g}, since model.precision {training.value} and rollout.precision "
            f"{sampling.value} differ"
        )
        next_step = "raise it or use one precision"
        report.add(_GAP, f"{gap:g}", expected, next_step, related=("model.precision", "rollout.precision"))
    last = config.seed + rollout.num_replicas - 1
    if last > MAX_SEED:
        expected = f"at most {MAX_SEED - rollout.num_replicas + 1}: replica i of {rollout.num_replicas} has seed + i"
        report.add("seed", config.seed, expected, "lower it", related=("rollout.num_replicas",))
