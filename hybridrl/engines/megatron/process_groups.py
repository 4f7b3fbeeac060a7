"""Starts the process groups of one training role, with a bound on every wait.

Ranks follow Megatron-core's order tp-cp-ep-dp-pp (``layout/parallel.py``). The groups are handed on as one
``ProcessGroupCollection``, explicitly, to the model, its gradient buckets, its optimizer and its pipeline schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from hybridrl.config.choices import Platform
from hybridrl.config.schema import ParallelConfig
from hybridrl.errors import EngineError, RankLostError
from hybridrl.layout.parallel import Coordinates, ParallelSizes, parallel_sizes
from hybridrl.reshard.lost_peer import is_lost_peer
from hybridrl.reshard.transports.store import open_store

_BACKENDS = {Platform.CPU: "gloo", Platform.CUDA: "nccl"}


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The groups of this rank.

    Attributes:
        collection: Megatron's groups, one attribute per axis.
        at: Position of this rank on every axis.
    """

    rank: int
    sizes: ParallelSizes
    at: Coordinates
    collection: ProcessGroupCollection
    device: torch.device

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits and losses."""
        return self.at.pp == self.sizes.pp - 1

    @property
    def is_reporting(self) -> bool:
        """Whether this rank returns results for its data-parallel rank."""
        return self.is_last_stage and self.at.tp == 0 and self.at.cp == 0


def start_process_group(
    rank: int, parallel: ParallelConfig, platform: Platform, init_method: str, timeout_s: float, local_rank: int = 0
) -> ProcessGroups:
    """Join the role's ranks and build Megatron's groups. Collective: every rank of the role calls it.

    Args:
        rank: In [0, world size of `parallel`).
        init_method: Where ranks meet, e.g. ``tcp://10.0.0.5:29500``.
        timeout_s: Bound on this call and on every later collective, in seconds.
        local_rank: Device index (cuda platform).

    Raises:
        RankLostError: When a rank stays away.
        EngineError: When expert degrees do not divide the ranks of a pipeline stage, or this rank cannot join.
    """
    sizes = parallel_sizes(parallel)
    _check_sizes(sizes)
    device = torch.device("cpu") if platform is Platform.CPU else torch.device("cuda", local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _store(init_method, rank, timeout)
        dist.init_process_group(
            _BACKENDS[platform],
            init_method=None if store else init_method,
            store=store,
            rank=rank,
            world_size=sizes.world_size,
            timeout=timeout,
        )
    except (OSError, RuntimeError, dist.DistError) as e:
        kind = RankLostError if is_lost_peer(e) else EngineError
        raise kind(
            f"training rank {rank}: the {sizes.world_size} ranks did not meet at {init_method} within {timeout_s:.0f} s ({e}); "
            "check that every rank started and that the address is reachable"
        ) from e
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp_size if parallel.vpp_size > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=False,
    )
    return ProcessGroups(rank, sizes, sizes.coordinates(rank), ProcessGroupCollection.use_mpu_process_groups(), device)


def _store(init_method: str, rank: int, timeout: timedelta) -> dist.TCPStore | None:
    """Open the store of a ``tcp://`` method, on that address alone; other methods open their own."""
    url = urlsplit(init_method)
    if url.scheme != "tcp":
        return None
    assert url.hostname and url.port, init_method
    return open_store(url.hostname, url.port, is_master=rank == 0, timeout=timeout)


def stop_process_group() -> None:
    """Leave all groups."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _check_sizes(sizes: ParallelSizes) -> None:
    per_stage = sizes.tp * sizes.cp * sizes.dp
    if per_stage % (sizes.ep * sizes.etp):
        raise EngineError(
            f"tp_size * cp_size * dp_size is {per_stage}, which does not divide by ep_size * etp_size "
            f"{sizes.ep * sizes.etp}; expert groups are cut from the ranks of a pipeline stage"
        )
