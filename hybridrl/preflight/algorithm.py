"""Does the algorithm hold together: has it what it needs, and is every key of its section read?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.algorithm import AdvantageConfig, AlgorithmConfig, PolicyLossConfig
from hybridrl.config.choices import (
    AdvantageEstimator,
    CorrectionMethod,
    KlEstimator,
    LossAggregation,
    OldPolicy,
    PolicyLossKind,
)
from hybridrl.config.schema import ExperimentConfig
from hybridrl.config.user_function import FunctionReference, find_function
from hybridrl.errors import ConfigError
from hybridrl.preflight.report import Report

_NEED_GROUPS = (
    AdvantageEstimator.GRPO,
    AdvantageEstimator.DR_GRPO,
    AdvantageEstimator.RLOO,
    AdvantageEstimator.REINFORCE_PP_BASELINE,
)
_READ_EPSILON = (
    AdvantageEstimator.GRPO,
    AdvantageEstimator.REINFORCE_PP,
    AdvantageEstimator.REINFORCE_PP_BASELINE,
    AdvantageEstimator.GAE,
)
_OVER_SEQUENCES = (PolicyLossKind.GSPO, PolicyLossKind.GMPO)
_LOSSES_THAT_READ: dict[str, tuple[PolicyLossKind, ...]] = {
    "clip_low": tuple(kind for kind in PolicyLossKind if kind is not PolicyLossKind.SAPO),
    "clip_high": tuple(kind for kind in PolicyLossKind if kind is not PolicyLossKind.SAPO),
    "dual_clip": (PolicyLossKind.DUAL_CLIP,),
    "positive_temperature": (PolicyLossKind.SAPO,),
    "negative_temperature": (PolicyLossKind.SAPO,),
}
_ESTIMATOR_ARGUMENTS = ("inputs: AdvantageInputs", "config: AdvantageConfig")
_LOSS_ARGUMENTS = ("tokens: PolicyTokens", "config: PolicyLossConfig")


def check_algorithm(report: Report, config: ExperimentConfig) -> None:
    """Check that the parts of the algorithm are available and go together."""
    algorithm = config.algorithm
    _check_function(report, "algorithm.advantage", algorithm.advantage, _ESTIMATOR_ARGUMENTS)
    _check_function(report, "algorithm.policy_loss", algorithm.policy_loss, _LOSS_ARGUMENTS)
    _check_estimator(report, algorithm)
    _check_whole_sequences(report, config)
    _check_kl(report, algorithm)
    _check_correction(report, config)
    key = "algorithm.loss_norm_tokens"
    if algorithm.loss_aggregation is LossAggregation.SEQ_MEAN_TOKEN_SUM_NORM and algorithm.loss_norm_tokens is None:
        expected = "a number of tokens, since algorithm.loss_aggregation is seq_mean_token_sum_norm"
        report.add(
            key, "null", expected, "set it, e.g. to the longest response", related=("algorithm.loss_aggregation",)
        )
    overlong = algorithm.overlong
    if overlong.max_tokens is not None and overlong.buffer_tokens > overlong.max_tokens:
        expected = f"at most algorithm.overlong.max_tokens = {overlong.max_tokens}"
        related = ("algorithm.overlong.max_tokens",)
        report.add("algorithm.overlong.buffer_tokens", overlong.buffer_tokens, expected, "lower it", related=related)


def unread_by_algorithm(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Yield keys that have no effect on this algorithm, and why."""
    yield from _unread_by_functions(algorithm)
    if algorithm.policy_loss.kl_coef == 0:
        for name in ("kl_estimator", "kl_unbiased_gradient"):
            yield f"algorithm.policy_loss.{name}", "when algorithm.policy_loss.kl_coef is 0"
    elif algorithm.policy_loss.kl_estimator is KlEstimator.K2:
        reason = "when algorithm.policy_loss.kl_estimator is k2, whose own gradient that is"
        yield "algorithm.policy_loss.kl_unbiased_gradient", reason
    if algorithm.reward_kl.coef == 0:
        yield "algorithm.reward_kl", "when algorithm.reward_kl.coef is 0"
    elif algorithm.reward_kl.target is None:
        yield "algorithm.reward_kl.horizon_samples", "when algorithm.reward_kl.target is null"
    if algorithm.overlong.max_tokens is None:
        yield "algorithm.overlong", "when algorithm.overlong.max_tokens is null"
    if algorithm.loss_aggregation is not LossAggregation.SEQ_MEAN_TOKEN_SUM_NORM:
        yield "algorithm.loss_norm_tokens", f"when algorithm.loss_aggregation is {algorithm.loss_aggregation.value}"
    yield from _unread_by_correction(algorithm)


def _unread_by_functions(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    advantage, loss = algorithm.advantage, algorithm.policy_loss
    if advantage.path is not None:
        yield "algorithm.advantage.estimator", "when algorithm.advantage.path is set"
    else:
        yield from _unread_by_estimator(advantage)
    if loss.path is not None:
        yield "algorithm.policy_loss.kind", "when algorithm.policy_loss.path is set"
        return
    for name, kinds in _LOSSES_THAT_READ.items():
        if loss.kind not in kinds:
            yield f"algorithm.policy_loss.{name}", f"when algorithm.policy_loss.kind is {loss.kind.value}"


def _unread_by_estimator(advantage: AdvantageConfig) -> Iterator[tuple[str, str]]:
    section, reason = "algorithm.advantage", f"when algorithm.advantage.estimator is {advantage.estimator.value}"
    for name in ("needs_values", "needs_greedy"):
        yield f"{section}.{name}", f"when {section}.path is null"
    if advantage.estimator not in _READ_EPSILON:
        yield f"{section}.epsilon", reason
    if advantage.estimator is not AdvantageEstimator.GAE:
        for name in ("discount", "trace_decay", "whiten"):
            yield f"{section}.{name}", reason
    elif not advantage.whiten:
        yield f"{section}.epsilon", f"when {section}.whiten is false"


def _unread_by_correction(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    correction, section = algorithm.rollout_correction, "algorithm.rollout_correction"
    if correction.old_policy is OldPolicy.BYPASS:
        for name in ("method", "level", "min_weight", "max_weight"):
            yield f"{section}.{name}", f"when {section}.old_policy is bypass, which makes all weights 1"
    elif correction.method is CorrectionMethod.NONE:
        for name in ("level", "min_weight", "max_weight"):
            yield f"{section}.{name}", f"when {section}.method is none"
    elif correction.method is CorrectionMethod.TRUNCATE:
        yield f"{section}.min_weight", f"when {section}.method is truncate"


def _check_function(
    report: Report, section: str, config: AdvantageConfig | PolicyLossConfig, arguments: tuple[str, ...]
) -> None:
    """Check that a user's function can be found; path and name belong together."""
    keys = (f"{section}.path", f"{section}.name")
    if config.path is None or config.name is None:
        if config.path is not None or config.name is not None:
            missing, given = (keys[1], keys[0]) if config.name is None else keys
            report.add(missing, "null", f"a value, since {given} is set", "set both or neither", related=keys)
        return
    try:
        find_function(FunctionReference(Path(config.path), config.name), arguments)
    except ConfigError as e:
        if not any(report.draft.is_broken(key) for key in keys):
            report.problems.append(f"{report.draft.where(keys[0])}: {section}: {e}")


def _check_estimator(report: Report, algorithm: AlgorithmConfig) -> None:
    advantage, key = algorithm.advantage, "algorithm.advantage.estimator"
    if advantage.path is not None:
        return
    if advantage.estimator in _NEED_GROUPS and algorithm.samples_per_prompt < 2:
        expected = f"at least 2, since {key} is {advantage.estimator.value}, which compares samples of one prompt"
        samples = algorithm.samples_per_prompt
        report.add("algorithm.samples_per_prompt", samples, expected, "raise it", related=(key,))
    if algorithm.max_sampling_rounds > 1 and algorithm.samples_per_prompt < 2 and not algorithm.needs_greedy:
        expected = "1, since algorithm.samples_per_prompt is 1: rewards of a single sample are always equal"
        related = ("algorithm.samples_per_prompt",)
        report.add(
            "algorithm.max_sampling_rounds", algorithm.max_sampling_rounds, expected, "lower it", related=related
        )


def _check_whole_sequences(report: Report, config: ExperimentConfig) -> None:
    loss, cp_size = config.algorithm.policy_loss, config.actor.parallel.cp_size
    if cp_size > 1 and (loss.path is not None or loss.kind in _OVER_SEQUENCES):
        name = f"{loss.path}" if loss.path is not None else loss.kind.value
        expected = f"1, since the policy loss {name} sees whole sequences, which context parallelism spreads over ranks"
        next_step = "set it to 1 or choose a loss per token"
        report.add("actor.parallel.cp_size", cp_size, expected, next_step, related=("algorithm.policy_loss",))


def _check_kl(report: Report, algorithm: AlgorithmConfig) -> None:
    loss, reward_kl = algorithm.policy_loss, algorithm.reward_kl
    if loss.kl_coef > 0 and reward_kl.coef > 0:
        expected = "0, since algorithm.policy_loss.kl_coef is above 0: the KL would be charged twice"
        report.add("algorithm.reward_kl.coef", reward_kl.coef, expected, "keep one of the two")
    if loss.kl_coef > 0 and loss.kl_estimator is KlEstimator.K1 and not loss.kl_unbiased_gradient:
        expected = "k2 or k3, or kl_unbiased_gradient: the gradient of k1 has expectation 0"
        related = ("algorithm.policy_loss.kl_coef", "algorithm.policy_loss.kl_unbiased_gradient")
        report.add("algorithm.policy_loss.kl_estimator", "k1", expected, "change one of them", related=related)
    num_samples = algorithm.prompts_per_step * algorithm.samples_per_prompt
    if reward_kl.target is not None and reward_kl.horizon_samples < num_samples:
        key, expected = "algorithm.reward_kl.horizon_samples", f"at least the {num_samples} samples of a step"
        related = ("algorithm.prompts_per_step", "algorithm.samples_per_prompt")
        report.add(key, reward_kl.horizon_samples, expected, "raise it", related=related)


def _check_correction(report: Report, config: ExperimentConfig) -> None:
    key, gap = "algorithm.rollout_correction.old_policy", config.trainer.max_logprob_gap
    if config.algorithm.rollout_correction.old_policy is OldPolicy.BYPASS and gap is not None:
        expected = f"decoupled, since trainer.max_logprob_gap is {gap:g}: there are no log-probs to compare with"
        related = ("trainer.max_logprob_gap",)
        report.add(key, "bypass", expected, "set trainer.max_logprob_gap to null", related=related)
