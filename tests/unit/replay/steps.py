"""A recorded step whose every number is right: two prompts of the reverse task, two samples each, one update per prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hybridrl.algos.algorithm import Algorithm
from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.choices import TaskName
from hybridrl.config.schema import DataConfig, ExperimentConfig, ModelConfig, TrainerConfig
from hybridrl.controller.batches import make_batch, mini_batches, policy_batch, values_before
from hybridrl.controller.replays import ReplayFiles
from hybridrl.data.batch import PolicyBatch
from hybridrl.data.sample import FinishReason, Prompt, Sample
from hybridrl.engines.megatron.results import UpdateMetrics

LENGTHS = (4, 3, 5, 4)


def make_config(algorithm: AlgorithmConfig | None = None) -> ExperimentConfig:
    return ExperimentConfig(
        name="demo",
        model=ModelConfig(path="weights"),
        data=DataConfig(task=TaskName.REVERSE),
        trainer=TrainerConfig(replay_steps="3"),
        algorithm=algorithm or AlgorithmConfig(mini_batches_per_step=2),
    )


def make_samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for index, num_tokens in enumerate(LENGTHS):
        mask = np.arange(2 + num_tokens) >= 2
        samples.append(
            Sample(
                Prompt(f"reverse:{index // 2}", (5, 6), "abc", "cba", "reverse"),
                index % 2,
                np.array([5, 6, *rng.integers(7, 30, num_tokens)], dtype=np.int32),
                mask,
                np.where(mask, rng.uniform(-2, 0, 2 + num_tokens), 0).astype(np.float32),
                np.where(mask, 3, -1).astype(np.int32),
                FinishReason.STOP,
                1,
                "cba<eos>" if index % 2 else "abc<eos>",
            )
        )
    return samples


def record_step(tmp_path: Path, config: ExperimentConfig, reward: float = 1.0) -> Path:
    """Write what the loop would at step 3; a correct answer earns `reward`."""
    algorithm = Algorithm(config.algorithm)
    greedy = [0.0, 0.0, 1.0, 1.0] if algorithm.needs_greedy else None
    batch = make_batch(make_samples(), [0.0, reward, 0.0, reward], greedy)
    old = np.where(batch.loss_mask, batch.rollout_logprobs + np.float32(0.125), np.float32(0))
    ref = np.where(batch.loss_mask, old - np.float32(0.25), np.float32(0)) if algorithm.needs_reference else None
    shape = batch.loss_mask.shape
    values = (
        np.linspace(0, 1, batch.loss_mask.size, dtype=np.float32).reshape(shape) if algorithm.needs_values else None
    )
    credit = algorithm.credit(
        batch.rewards, batch.group_ids, batch.loss_mask, batch.rollout_logprobs, old, ref,
        None if values is None else values_before(values), batch.greedy_rewards,
    )  # fmt: skip
    policy = policy_batch(batch, old, ref, credit.advantages, algorithm.loss_weights)
    parts = mini_batches(policy, config.algorithm.mini_batches_per_step, algorithm.loss_weights)
    updates = [_update(part) for part in parts]
    ReplayFiles(config, tmp_path, ("<eos>",)).record(3, batch, policy, credit, values, updates)
    return tmp_path / "replays" / "step_000003.parquet"


def _update(part: PolicyBatch) -> UpdateMetrics:
    """Return what an engine answers whose log-probs moved by 0.01: the ratio is inside the clip, so the loss is -ratio advantage.

    The reference lies 0.26 below them, of which k3 is exp(-0.26) + 0.26 - 1.
    """
    mask, old = part.loss_mask, part.old_logprobs
    loss = -(part.loss_weights.astype(np.float64) * np.exp(0.01) * part.advantages)[mask].sum()
    return UpdateMetrics(
        loss=float(loss), grad_norm=1.0, entropy=0.5, lr=1e-3, approx_kl=-0.01, clip_fraction=0.0, ratio_mean=float(np.exp(0.01)),
        ref_kl=0.0 if part.ref_logprobs is None else float(np.exp(-0.26)) + 0.26 - 1, num_tokens=int(mask.sum()), is_skipped=False, num_skipped=0,
        logprobs=np.where(mask, old + np.float32(0.01), np.float32(0)),
    )  # fmt: skip
