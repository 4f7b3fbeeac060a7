"""What the ranks of router replay tests run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from megatron.core.transformer.moe.router import TopKRouter
from numpy.typing import NDArray

from hybridrl.config.choices import Platform
from hybridrl.data.batch import PolicyBatch
from hybridrl.engines.megatron import cpu
from hybridrl.engines.megatron.engine import MegatronEngine
from hybridrl.engines.megatron.process_groups import start_process_group, stop_process_group
from hybridrl.engines.megatron.results import LogprobResult, UpdateMetrics
from hybridrl.errors import EngineError
from hybridrl.layout.parallel import parallel_sizes
from tests.dist import layout_matrix
from tests.dist import megatron_ranks as ranks


@dataclass(frozen=True)
class Outcome:
    """Of one rank.

    Attributes:
        rows: Its rows of the batch.
        recorded: A pass that recorded.
        replayed: A pass that replayed the batch's routing.
        num_routed: Times that the update chose each expert of each layer, as counted behind the routers, without recomputation.
    """

    rows: list[int]
    recorded: LogprobResult | None
    replayed: LogprobResult | None
    metrics: UpdateMetrics | None
    gradients: list[tuple[str, tuple[slice, ...], torch.Tensor]]
    num_routed: dict[int, NDArray[np.int64]]


def run_all(
    rank: int, init_method: str, setups: list[ranks.Setup], batch: PolicyBatch, world_size: int
) -> list[Outcome | None]:
    """Record, replay and update in each layout."""
    return layout_matrix.run_each(rank, init_method, [(setup, batch) for setup in setups], world_size, _step)


def _step(rank: int, init_method: str, setup: ranks.Setup, batch: PolicyBatch) -> Outcome:
    rows = ranks.rows_of_rank(batch.sequences.num_samples, rank, setup.parallel)
    mine = batch.select(rows)
    groups = start_process_group(rank, setup.parallel, Platform.CPU, init_method, timeout_s=60)
    built = ranks.build(setup, groups, setup.optimizer)
    recorded = built.logprobs(replace(mine.sequences, routing=None), 1.0)
    replayed = built.logprobs(mine.sequences, 1.0)
    start = {name: tensor.clone() for name, tensor in built.tensors().items()}
    num_routed = _count_routed(built)
    metrics = built.update(mine, ranks.LOSS, 1.0, want_logprobs=True)
    gradients = ranks.copy_out(
        built.shard_map(ranks.place(rank)), {name: start[name] - tensor for name, tensor in built.tensors().items()}
    )
    layout_matrix.let_go(built)
    stop_process_group()
    return Outcome(rows.tolist(), recorded, replayed, metrics, gradients, num_routed)


def _count_routed(engine: MegatronEngine) -> dict[int, NDArray[np.int64]]:
    """Count the experts that leave each router in the passes that gradients flow through."""
    counts: dict[int, NDArray[np.int64]] = {}
    for chunk in engine._chunks:
        for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
            counts[router.layer_number - 1] = np.zeros(router.config.num_moe_experts, dtype=np.int64)

            def count(router: TopKRouter, inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
                if torch.is_grad_enabled():
                    counts[router.layer_number - 1] += output[1].sum(0).numpy()

            router.register_forward_hook(count)
    return counts


def refusals(rank: int, init_method: str, setup: ranks.Setup, batch: PolicyBatch) -> list[str]:
    """Wire replay wrongly in several ways; return what each is answered with."""
    cpu.install()
    assert parallel_sizes(setup.parallel).world_size == 1
    groups = start_process_group(rank, setup.parallel, Platform.CPU, init_method, timeout_s=60)
    built = ranks.build(setup, groups, setup.optimizer)
    routing = batch.sequences.routing
    assert routing is not None

    def update_with(routing: NDArray[np.int16] | None) -> Callable[[], object]:
        return lambda: built.update(
            replace(batch, sequences=replace(batch.sequences, routing=routing)), ranks.LOSS, 1.0
        )

    def unbound() -> object:
        for module in built._chunks[0].modules():
            if isinstance(module, TopKRouter) and module.layer_number == 2:
                module.router_replay = None
        return update_with(routing)()

    answers = []
    for action in (
        update_with(None),
        update_with(np.full_like(routing, -1)),
        update_with(routing[:, :, :-1]),
        update_with(routing[..., :1]),
        unbound,
    ):
        try:
            action()
            answers.append("accepted")
        except EngineError as e:
            answers.append(str(e))
    stop_process_group()
    return answers
