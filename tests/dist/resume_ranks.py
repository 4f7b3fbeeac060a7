"""What the ranks of tests of the training state run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hybridrl.checkpoint.state_file import write_rank_state
from hybridrl.data.batch import PolicyBatch
from hybridrl.engines.megatron.results import UpdateMetrics
from tests.dist import megatron_ranks as ranks


UNSAVED = 2


@dataclass(frozen=True)
class Trained:
    """Of one rank: the metrics of its updates, and its parameters after each."""

    metrics: list[UpdateMetrics | None]
    parameters: list[list[tuple[str, tuple[slice, ...], torch.Tensor]]]


def train(
    rank: int,
    init_method: str,
    setup: ranks.Setup,
    batches: list[PolicyBatch],
    load_from: list[Path] | None = None,
    save_to: Path | None = None,
) -> Trained:
    """Load a state, update once per batch, and save the state as it is before the last :data:`UNSAVED` of them."""
    trained = Trained([], [])
    with ranks.engine(rank, init_method, setup) as built:
        if load_from is not None:
            built.state.load(load_from)
        for index, batch in enumerate(batches):
            if save_to is not None and index == len(batches) - UNSAVED:
                write_rank_state(save_to / f"rank_{rank:05d}.safetensors", built.state.snapshot())
            mine = batch.select(ranks.rows_of_rank(batch.sequences.num_samples, rank, setup.parallel))
            trained.metrics.append(built.update(mine, ranks.LOSS, 1.0))
            trained.parameters.append(ranks.copy_out(built.shard_map(ranks.place(rank)), built.tensors()))
    return trained
