"""An algorithm, as the loop sees it: it says what it needs, and turns scored samples into advantages and loss weights.

rewards - overlong penalties, KL penalties -> advantages per token (``advantage/``) -> times importance weights
(``rollout_correction.py``); the policy loss runs inside the training engine (``policy_loss.py``)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrl.algos.advantage.estimate import estimate_advantages, make_estimator
from hybridrl.algos.advantage.inputs import AdvantageInputs
from hybridrl.algos.aggregate import loss_weights
from hybridrl.algos.kl import RewardKl
from hybridrl.algos.overlong import overlong_penalties
from hybridrl.algos.rollout_correction import correct_rollouts
from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.choices import OldPolicy


@dataclass(frozen=True, slots=True)
class Credit:
    """What each token of a batch is worth.

    Attributes:
        advantages: [num_samples, max_tokens] float32; importance weights included, 0 outside the mask.
        returns: [num_samples, max_tokens] float32; what the critic learns, 0 outside the mask; None without a critic.
        metrics: What was counted and measured, by the names under which it is written.
    """

    advantages: NDArray[np.float32]
    returns: NDArray[np.float32] | None
    metrics: Mapping[str, int | float]


class Algorithm:
    """The configured algorithm.

    Attributes:
        needs_reference: Whether the log-probs of the frozen reference are used.
        needs_values: Whether the values of a critic are used, which then learns the returns.
        needs_greedy: Whether a greedy sample of each prompt is drawn, whose reward is a baseline.
        needs_old_logprobs: Whether the trainer computes log-probs before the update; otherwise the sampler's are taken.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._estimator = make_estimator(config.advantage)
        self._reward_kl = RewardKl(config.reward_kl) if config.reward_kl.coef > 0 else None
        self.needs_reference = config.needs_reference
        self.needs_values = config.needs_values
        self.needs_greedy = config.needs_greedy
        self.needs_old_logprobs = config.rollout_correction.old_policy is OldPolicy.DECOUPLED

    def credit(
        self,
        rewards: NDArray[np.float64],
        group_ids: NDArray[np.int64],
        loss_mask: NDArray[np.bool_],
        rollout_logprobs: NDArray[np.float32],
        old_logprobs: NDArray[np.float32],
        ref_logprobs: NDArray[np.float32] | None,
        values: NDArray[np.float32] | None = None,
        greedy_rewards: NDArray[np.float64] | None = None,
    ) -> Credit:
        """Compute the advantages of one step's batch, and adapt the weight of the KL penalty.

        Args:
            rewards: [num_samples] finite.
            group_ids: [num_samples] equal for samples of one prompt.
            loss_mask: [num_samples, max_tokens] True where the policy produced the token.
            rollout_logprobs: [num_samples, max_tokens], the sampler's.
            old_logprobs: [num_samples, max_tokens], the trainer's before the update.
            ref_logprobs: [num_samples, max_tokens], the reference's; None when it is not needed.
            values: [num_samples, max_tokens], the critic's, of the state before each token; None when they are not needed.
            greedy_rewards: [num_samples], of the greedy sample of each one's prompt; None when it is not needed.

        Raises:
            ConfigError: When an estimator of the user's returns something else than finite advantages.
        """
        config = self._config
        overlong = overlong_penalties(loss_mask.sum(axis=1), config.overlong)
        kl_penalties, metrics = self._kl_penalties(old_logprobs, ref_logprobs, loss_mask)
        wide_values = None if values is None else values.astype(np.float64)
        inputs = AdvantageInputs(rewards - overlong, group_ids, loss_mask, kl_penalties, wide_values, greedy_rewards)
        if greedy_rewards is not None:
            metrics["reward/greedy_mean"] = float(greedy_rewards.mean())
        advantages = estimate_advantages(self._estimator, inputs, config.advantage)
        correction = correct_rollouts(old_logprobs, rollout_logprobs, loss_mask, config.rollout_correction)
        metrics |= {
            "groups/zero_advantage": advantages.num_zero_groups,
            "reward/overlong_penalty_mean": float(overlong.mean()),
            "correction/effective_samples": correction.effective_samples,
            "correction/clip_fraction": correction.clip_fraction,
        }
        return Credit(correction.weights * advantages.values, advantages.returns, metrics)

    def loss_weights(self, loss_mask: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return the [num_samples, max_tokens] weights of the token losses of one update's global batch."""
        return loss_weights(self._config.loss_aggregation, loss_mask, self._config.loss_norm_tokens)

    def state_dict(self) -> dict[str, float]:
        """Return what changes over the steps, for a checkpoint."""
        return {} if self._reward_kl is None else {"reward_kl_coef": self._reward_kl.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from what :meth:`state_dict` returned; what the algorithm does not use is left."""
        if self._reward_kl is not None and "reward_kl_coef" in state:
            self._reward_kl.coef = state["reward_kl_coef"]

    def _kl_penalties(
        self, old_logprobs: NDArray[np.float32], ref_logprobs: NDArray[np.float32] | None, loss_mask: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float64], dict[str, int | float]]:
        if self._reward_kl is None:
            return np.zeros(loss_mask.shape, dtype=np.float64), {}
        assert ref_logprobs is not None, "a KL penalty needs the reference"
        coef, kl = self._reward_kl.coef, self._reward_kl.divergence(old_logprobs, ref_logprobs, loss_mask)
        mean = float(kl.sum() / max(1, loss_mask.sum()))
        self._reward_kl.adapt(mean, len(loss_mask))
        return coef * kl, {"reward/kl_mean": mean, "reward/kl_coef": coef}
