"""Chosen steps of a run as replay files: ``replays/step_000000.parquet`` in the run's folder, for ``hybridrl replay``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hybridrl.algos.aggregate import loss_weights
from hybridrl.algos.algorithm import Credit
from hybridrl.config.dump import resolved_yaml
from hybridrl.config.schema import ExperimentConfig
from hybridrl.config.step_list import StepList, parse_steps
from hybridrl.controller.batches import ScoredBatch, mini_batches, values_before
from hybridrl.data.batch import Floats, PolicyBatch
from hybridrl.replay.replay_step import ReplayStep, UpdateValues
from hybridrl.replay.step_file import write_step

if TYPE_CHECKING:
    from hybridrl.engines.megatron.results import UpdateMetrics


class ReplayFiles:
    """Writes the steps of ``trainer.replay_steps``.

    Args:
        stop_texts: The tokenizer's stop tokens as a response shows them.
    """

    def __init__(self, config: ExperimentConfig, run_dir: Path, stop_texts: Sequence[str]) -> None:
        steps = config.trainer.replay_steps
        self._steps = StepList((), ()) if steps is None else parse_steps(steps)
        self._config = config
        self._folder = run_dir / "replays"
        self._stop_texts = tuple(stop_texts)

    def wants(self, step: int) -> bool:
        """Return whether a step is to be recorded."""
        return step in self._steps

    def record(
        self,
        step: int,
        batch: ScoredBatch,
        policy: PolicyBatch,
        credit: Credit,
        values: Floats | None,
        updates: Sequence[UpdateMetrics],
    ) -> None:
        """Write a step if it is wanted; the updates then have log-probs. A step that did not update the policy is not written.

        Of several passes over the batch, the first one is recorded.

        Args:
            values: [num_samples, max_tokens] of the state after each token; None without a critic.
        """
        if not self.wants(step) or not updates:
            return
        kl_coef = credit.metrics.get("reward/kl_coef")
        parts = mini_batches(policy, self._config.algorithm.mini_batches_per_step, self._weigh)
        updates = updates[: len(parts)]
        recorded = ReplayStep(
            step=step,
            version=step,
            config_text=resolved_yaml(self._config),
            stop_texts=self._stop_texts,
            reward_kl_coef=None if kl_coef is None else float(kl_coef),
            samples=batch.samples,
            rewards=batch.rewards,
            group_ids=batch.group_ids,
            greedy_rewards=batch.greedy_rewards,
            update_numbers=np.repeat(
                np.arange(len(parts), dtype=np.int32), [part.sequences.num_samples for part in parts]
            ),
            policy=replace(policy, loss_weights=np.concatenate([part.loss_weights for part in parts])),
            values=None if values is None else values_before(values),
            returns=credit.returns,
            logprobs=np.concatenate([update.logprobs for update in updates if update.logprobs is not None]),
            updates=tuple(_values(update) for update in updates),
        )
        write_step(self._folder / f"step_{step:06d}.parquet", recorded)

    def _weigh(self, loss_mask: NDArray[np.bool_]) -> Floats:
        algorithm = self._config.algorithm
        return loss_weights(algorithm.loss_aggregation, loss_mask, algorithm.loss_norm_tokens)


def _values(update: UpdateMetrics) -> UpdateValues:
    return UpdateValues(update.loss, update.entropy, update.approx_kl, update.clip_fraction, update.ref_kl)
