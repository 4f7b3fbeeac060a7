"""What a training rank has allocated after an update, from the storages themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hybridrl.data.batch import PolicyBatch
from tests.dist.megatron_ranks import LOSS, Setup, engine, rows_of_rank


@dataclass(frozen=True)
class Allocated:
    """Bytes by kind; what is a view of something else is counted there."""

    weights: int
    gradients: int
    optimizer: int


def allocated_after_update(rank: int, init_method: str, setup: Setup, batch: PolicyBatch) -> Allocated:
    """Update once, so that the optimizer has made its state."""
    with engine(rank, init_method, setup) as built:
        built.update(batch.select(rows_of_rank(batch.sequences.num_samples, rank, setup.parallel)), LOSS, 1.0)
        chunks, optimizer = built._pipeline._chunks, built._optimizer._optimizer
        weights = _storages(built.tensors().values())
        gradients = _storages(p.main_grad for chunk in chunks for p in chunk.parameters())
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        mains = [p for part in parts for group in part.param_groups for p in group["params"]]
        moments = [value for part in parts for state in part.optimizer.state.values() for value in state.values()]
        state = _storages([*mains, *(m for m in moments if torch.is_tensor(m) and m.dim())])
        for known in (weights, gradients):
            state = {address: size for address, size in state.items() if address not in known}
        return Allocated(sum(weights.values()), sum(gradients.values()), sum(state.values()))


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the size of each storage by its address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
