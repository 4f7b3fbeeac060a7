"""What the ranks of tests of critics and reward models run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from hybridrl.config.choices import Platform, Precision
from hybridrl.config.schema import MicroBatchConfig, ParallelConfig
from hybridrl.data.batch import ValueBatch
from hybridrl.engines.megatron import cpu
from hybridrl.engines.megatron.process_groups import ProcessGroups, start_process_group, stop_process_group
from hybridrl.engines.megatron.results import ValueMetrics
from hybridrl.engines.megatron.value_engine import ValueEngine
from hybridrl.errors import EngineError
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.value_model import read_value_model_spec
from tests.dist import megatron_ranks as ranks

CLIP_VALUE = 0.5


@dataclass(frozen=True)
class Critic:
    """A checkpoint and how its ranks hold it; `target` is where they export it."""

    folder: Path
    target: Path
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass(frozen=True)
class Outcome:
    """Of one rank: its rows, what it reports, and its slices of the summed gradient."""

    rows: np.ndarray
    values: np.ndarray | None
    rewards: np.ndarray | None
    metrics: ValueMetrics | None
    gradients: list[tuple[str, tuple[slice, ...], torch.Tensor]]


def build(critic: Critic, groups: ProcessGroups) -> ValueEngine:
    return ValueEngine(
        read_value_model_spec(critic.folder),
        hf_folder=critic.folder,
        parallel=critic.parallel,
        precision=Precision.FLOAT32,
        platform=Platform.CPU,
        optimizer=ranks.SHOW_GRADIENT,
        micro_batch=MicroBatchConfig(tokens=40),
        seed=1,
        groups=groups,
    )


def score_save_and_update(rank: int, init_method: str, critic: Critic, batch: ValueBatch) -> Outcome:
    rows = ranks.rows_of_rank(batch.sequences.num_samples, rank, critic.parallel)
    mine = batch.select(rows)
    groups = start_process_group(rank, critic.parallel, Platform.CPU, init_method, timeout_s=60)
    built = build(critic, groups)
    built.load_checkpoint(critic.folder)
    values, rewards = built.values(mine.sequences), built.rewards(mine.sequences)
    built.save_checkpoint(critic.target)
    start = {name: tensor.clone() for name, tensor in built.tensors().items()}
    metrics = built.update_values(mine, CLIP_VALUE)
    stepped = {name: start[name] - tensor for name, tensor in built.tensors().items()}
    gradients = ranks.copy_out(built.shard_map(ranks.place(rank)), stepped)
    stop_process_group()
    return Outcome(rows, values, rewards, metrics, gradients)


def start_from_policy(rank: int, init_method: str, critic: Critic) -> tuple[Mapping[str, torch.Tensor], list[str]]:
    """Load a checkpoint without a value head, export it, and return this rank's tensors and what was logged."""
    cpu.install()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hybridrl").addHandler(handler)
    groups = start_process_group(rank, critic.parallel, Platform.CPU, init_method, timeout_s=60)
    built = build(critic, groups)
    built.load_checkpoint(critic.folder)
    built.save_checkpoint(critic.target)
    stop_process_group()
    return built.tensors(), messages


def refusals(rank: int, init_method: str, critic: Critic, two_labels: Path, batch: ValueBatch) -> list[str]:
    """Return the messages of what no value engine does."""
    cpu.install()
    groups = start_process_group(rank, critic.parallel, Platform.CPU, init_method, timeout_s=60)
    built = build(critic, groups)
    first = np.zeros_like(batch.loss_mask)
    weights_outside = ValueBatch(batch.sequences, first, batch.old_values, batch.returns, batch.loss_weights)
    policy = {"hf_folder": critic.folder, "parallel": critic.parallel}
    attempts = [
        lambda: built.logprobs(batch.sequences, 1.0),
        lambda: built.update_supervised(batch.sequences, batch.loss_weights),
        lambda: built.update_values(weights_outside),
        lambda: build(Critic(two_labels, critic.target), groups),
        lambda: ValueEngine(read_model_spec(critic.folder), **policy),
    ]
    messages = []
    for attempt in attempts:
        try:
            attempt()
        except EngineError as e:
            messages.append(str(e))
    stop_process_group()
    return messages
