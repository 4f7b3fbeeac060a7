"""Many layouts on the same ranks: groups are made and destroyed between them, and ranks that a layout leaves over wait."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from hybridrl.config.choices import Platform
from hybridrl.data.batch import PolicyBatch
from hybridrl.engines.megatron import cpu
from hybridrl.engines.megatron.engine import MegatronEngine
from hybridrl.engines.megatron.process_groups import start_process_group, stop_process_group
from hybridrl.engines.megatron.results import LogprobResult, UpdateMetrics
from hybridrl.layout.parallel import parallel_sizes
from tests.dist import megatron_ranks as ranks

T = TypeVar("T")
TEMPERATURE = 0.7
# Of one rank: its rows, what it reports, and its slices of the summed gradient.
Outcome = tuple[
    list[int], LogprobResult | None, UpdateMetrics | None, list[tuple[str, tuple[slice, ...], torch.Tensor]]
]


def run_all(
    rank: int, init_method: str, setups: list[ranks.Setup], batches: list[PolicyBatch], world_size: int
) -> list[Outcome | None]:
    """Take one step in each layout."""
    return run_each(rank, init_method, list(zip(setups, batches, strict=True)), world_size, _step)


def run_each(
    rank: int,
    init_method: str,
    cases: list[tuple[ranks.Setup, PolicyBatch]],
    world_size: int,
    step: Callable[[int, str, ranks.Setup, PolicyBatch], T],
) -> list[T | None]:
    """Run a step in each layout; None where this rank is not part of it."""
    cpu.install()
    folder = init_method.removeprefix("file://")
    # The ranks start each layout together, so that none waits for another within the bounds of a collective.
    gate = dist.FileStore(f"{folder}-gate", world_size)
    outcomes: list[T | None] = []
    for number, (setup, batch) in enumerate(cases):
        outcome = None
        if rank < parallel_sizes(setup.parallel).world_size:
            outcome = step(rank, f"{init_method}-{number}", setup, batch)
        outcomes.append(outcome)
        gc.collect()
        gate.set(f"{number}/{rank}", "")
        gate.wait([f"{number}/{other}" for other in range(world_size)])
    return outcomes


def let_go(engine: MegatronEngine) -> None:
    """Empty the wrappers that autograd's hooks keep for good, and with them process groups and dozens of gloo threads."""
    for chunk in engine._pipeline._chunks:
        chunk.__dict__.clear()


def _step(rank: int, init_method: str, setup: ranks.Setup, batch: PolicyBatch) -> Outcome:
    rows = ranks.rows_of_rank(batch.sequences.num_samples, rank, setup.parallel)
    mine = batch.select(rows)
    groups = start_process_group(rank, setup.parallel, Platform.CPU, init_method, timeout_s=60)
    built = ranks.build(setup, groups, setup.optimizer)
    before = built.logprobs(mine.sequences, TEMPERATURE)
    start = {name: tensor.clone() for name, tensor in built.tensors().items()}
    metrics = built.update(mine, ranks.LOSS, TEMPERATURE, want_logprobs=True)
    stepped = {name: start[name] - tensor for name, tensor in built.tensors().items()}
    gradients = ranks.copy_out(built.shard_map(ranks.place(rank)), stepped)
    let_go(built)
    stop_process_group()
    return rows.tolist(), before, metrics, gradients
