"""The section ``algorithm`` of the configuration: what is learnt from the samples of a step."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.choices import (
    AdvantageEstimator,
    CorrectionLevel,
    CorrectionMethod,
    KlEstimator,
    LossAggregation,
    OldPolicy,
    PolicyLossKind,
)
from hybridrl.config.fields import setting


@dataclass
class AdvantageConfig:
    """From rewards to advantages."""

    estimator: AdvantageEstimator = setting(AdvantageEstimator.GRPO, "Estimator that comes with HybridRL")
    path: str | None = setting(None, "Python file with an estimator of your own", is_input_path=True)
    name: str | None = setting(None, "Function in that file, taking (inputs, config)")
    needs_values: bool = setting(False, "Whether an estimator of your own reads a critic's values and returns targets")
    needs_greedy: bool = setting(
        False, "Whether an estimator of your own reads the reward of a greedy sample of each prompt"
    )
    epsilon: float = setting(1e-4, "Added to the standard deviation that divides", at_least=0)
    discount: float = setting(1.0, "Discount of the next token (gae)", above=0, at_most=1)
    trace_decay: float = setting(1.0, "Lambda: 1 trusts rewards alone, 0 the next value (gae)", at_least=0, at_most=1)
    whiten: bool = setting(True, "Bring advantages to mean 0 and deviation 1 over the batch (gae)")


@dataclass
class PolicyLossConfig:
    """The policy loss per token and the terms beside it."""

    kind: PolicyLossKind = setting(PolicyLossKind.CLIP, "Loss that comes with HybridRL")
    path: str | None = setting(
        None, "Python file with a loss of your own, readable on every training node", is_input_path=True
    )
    name: str | None = setting(None, "Function in that file, taking (tokens, config)")
    clip_low: float = setting(0.2, "Ratio is clipped below 1 - clip_low", above=0, at_most=1)
    clip_high: float = setting(0.28, "Ratio is clipped above 1 + clip_high", above=0)
    dual_clip: float = setting(3.0, "Bound on the ratio where the advantage is negative (dual_clip)", above=1)
    positive_temperature: float = setting(1.0, "Steepness of the gate where the advantage is positive (sapo)", above=0)
    negative_temperature: float = setting(1.05, "Steepness of the gate where it is negative (sapo)", above=0)
    entropy_coef: float = setting(0.0, "Weight of the entropy bonus", at_least=0)
    kl_coef: float = setting(
        0.0, "Weight of the KL to the frozen reference, the starting checkpoint; 0 runs without one", at_least=0
    )
    kl_estimator: KlEstimator = setting(KlEstimator.K3, "Estimator of that KL per token")
    kl_unbiased_gradient: bool = setting(
        False, "Give k1 and k3 the gradient of k2, whose expectation is the gradient of the KL"
    )


@dataclass
class RewardKlConfig:
    """KL to the frozen reference, which is the starting checkpoint, taken off the reward of each token."""

    coef: float = setting(0.0, "Weight, or the first one with a target; 0 runs without", at_least=0)
    estimator: KlEstimator = setting(KlEstimator.K1, "Estimator per token")
    target: float | None = setting(
        None, "KL per token that an adaptive weight steers to; null keeps the weight", above=0
    )
    horizon_samples: int = setting(10_000, "Samples over which an adaptive weight reacts", at_least=1)


@dataclass
class RolloutCorrectionConfig:
    """What makes up for samples that another policy, or another engine, drew."""

    old_policy: OldPolicy = setting(
        OldPolicy.DECOUPLED,
        "Compute old_logprobs with the trainer and weigh by their ratio to the sampler's, or take the sampler's for them",
    )
    method: CorrectionMethod = setting(
        CorrectionMethod.TRUNCATE,
        "Cut importance weights exp(old_logprobs - rollout_logprobs) at max_weight, set those outside the bounds to 0, or "
        "weigh everything by 1",
    )
    level: CorrectionLevel = setting(
        CorrectionLevel.TOKEN, "Ratio of each token, of the whole sequence, or its geometric mean per token"
    )
    min_weight: float = setting(0.0, "Smallest weight that is kept (mask)", at_least=0, at_most=1)
    max_weight: float = setting(2.0, "Largest weight", at_least=1)


@dataclass
class OverlongConfig:
    """A penalty on responses that come close to a limit."""

    max_tokens: int | None = setting(
        None, "Policy tokens at which the whole penalty is due; null turns it off", at_least=1
    )
    buffer_tokens: int = setting(0, "Tokens before max_tokens over which the penalty grows from 0", at_least=0)
    penalty: float = setting(1.0, "Reward taken off at max_tokens", above=0)


@dataclass
class AlgorithmConfig:
    """What is learnt from the samples of a step. The defaults are GRPO."""

    prompts_per_step: int = setting(32, "Prompts per step, over all replicas", at_least=1)
    samples_per_prompt: int = setting(8, "Samples per prompt: the group of group-normalised advantages", at_least=1)
    mini_batches_per_step: int = setting(1, "Optimizer steps per pass over a batch", at_least=1)
    epochs_per_step: int = setting(1, "Passes over each batch", at_least=1)
    max_sampling_rounds: int = setting(
        1,
        "Rounds of rollouts per step, at most: above 1, prompts whose samples all have the same reward are replaced by new "
        "ones (dynamic sampling)",
        at_least=1,
    )
    loss_aggregation: LossAggregation = setting(LossAggregation.TOKEN_MEAN, "Average of the token losses")
    loss_norm_tokens: int | None = setting(
        None, "Tokens that each sequence's summed loss is divided by (seq_mean_token_sum_norm)", at_least=1
    )
    advantage: AdvantageConfig = setting(AdvantageConfig, "Advantages")
    policy_loss: PolicyLossConfig = setting(PolicyLossConfig, "Policy loss")
    reward_kl: RewardKlConfig = setting(RewardKlConfig, "KL taken off the reward")
    rollout_correction: RolloutCorrectionConfig = setting(RolloutCorrectionConfig, "Off-policy correction")
    overlong: OverlongConfig = setting(OverlongConfig, "Length penalty")

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per batch."""
        return self.mini_batches_per_step * self.epochs_per_step

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of the frozen reference are used."""
        return self.policy_loss.kl_coef > 0 or self.reward_kl.coef > 0

    @property
    def needs_values(self) -> bool:
        """Whether the values of a critic are used."""
        advantage = self.advantage
        return advantage.needs_values if advantage.path is not None else advantage.estimator is AdvantageEstimator.GAE

    @property
    def needs_greedy(self) -> bool:
        """Whether a greedy sample of each prompt is drawn as a baseline."""
        advantage = self.advantage
        return advantage.needs_greedy if advantage.path is not None else advantage.estimator is AdvantageEstimator.REMAX
