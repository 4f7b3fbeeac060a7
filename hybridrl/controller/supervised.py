"""The supervised loop: demonstrations -> update, on the same engine as RL."""

from __future__ import annotations

import time

from hybridrl.algos.aggregate import loss_weights
from hybridrl.config.choices import LossAggregation
from hybridrl.controller.interfaces import Recorder, SupervisedActor
from hybridrl.data.demonstrations import Demonstration, pad_demonstrations
from hybridrl.data.stream import Stream
from hybridrl.roles.future import wait_for


def train_supervised(
    actor: SupervisedActor,
    demonstrations: Stream[Demonstration],
    recorder: Recorder,
    *,
    num_steps: int,
    samples_per_step: int,
) -> None:
    """Take `num_steps` optimizer steps on the mean negative log-likelihood per learnt token.

    Raises:
        EngineError: A rank failed; names role, rank and phase.
    """
    recorder.start_steps()
    for step in range(num_steps):
        started = time.perf_counter()
        with recorder.phase("data"):
            batch, loss_mask = pad_demonstrations(demonstrations.take(samples_per_step))
            weights = loss_weights(LossAggregation.TOKEN_MEAN, loss_mask)
        with recorder.phase("train"):
            update = wait_for(actor.update_supervised(batch, weights))
        metrics = {
            "sft/loss": update.loss,
            "sft/grad_norm": update.grad_norm,
            "sft/lr": update.lr,
            "sft/skipped_updates": update.num_skipped,
            "throughput/tokens_per_s": batch.num_tokens / (time.perf_counter() - started),
        }
        recorder.record_step(step, metrics, ())
