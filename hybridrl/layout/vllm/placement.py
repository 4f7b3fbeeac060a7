"""Which experts and which layers a vLLM worker holds.

Source: vllm 0.32 ``model_executor/layers/fused_moe/expert_map_manager.py`` (determine_expert_map) and
``distributed/utils.py`` (get_pp_indices).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from hybridrl.errors import LayoutError


class ExpertPlacement(enum.Enum):
    """How experts are dealt to expert-parallel ranks."""

    LINEAR = "linear"
    ROUND_ROBIN = "round_robin"


def placed_experts(placement: ExpertPlacement, num_experts: int, ep_size: int, ep_rank: int) -> Sequence[int]:
    """Return the experts of a worker in the order of its slots."""
    if placement is ExpertPlacement.ROUND_ROBIN:
        return range(ep_rank, num_experts, ep_size)
    return linear_experts(num_experts, ep_size, ep_rank)


def linear_experts(num_experts: int, ep_size: int, ep_rank: int) -> range:
    """Return the experts of a worker under linear placement; the first ranks take the remainder.

    Example: 10 experts on 4 ranks -> 3, 3, 2, 2.
    """
    base, remainder = divmod(num_experts, ep_size)
    start = ep_rank * base + min(ep_rank, remainder)
    return range(start, start + base + (ep_rank < remainder))


def physical_experts(
    physical_to_logical: Sequence[int], num_experts: int, ep_size: int, ep_rank: int, what: str
) -> Sequence[int]:
    """Return the experts in a worker's slots when expert load balancing put them there.

    Args:
        physical_to_logical: Expert of each slot of a layer, over all ranks.
        what: Named in errors.

    Raises:
        LayoutError: When slots do not divide over ranks, or name experts that the layer lacks, or miss one.
    """
    if len(physical_to_logical) % ep_size:
        raise LayoutError(f"{what}: {len(physical_to_logical)} expert slots do not divide by {ep_size} ranks")
    if set(physical_to_logical) != set(range(num_experts)):
        wrong = sorted(set(physical_to_logical) ^ set(range(num_experts)))
        raise LayoutError(f"{what}: the expert map and the layer's {num_experts} experts differ in {wrong[:8]}")
    mine = len(physical_to_logical) // ep_size
    return physical_to_logical[ep_rank * mine : (ep_rank + 1) * mine]


def layers_of_stage(num_layers: int, pp_size: int, pp_rank: int, partition: Sequence[int] | None) -> range:
    """Return the layers of a pipeline rank; the ranks before the last take the remainder, from the back.

    Example: 10 layers on 4 ranks -> 2, 3, 3, 2.

    Raises:
        LayoutError: When an explicit partition does not fit.
    """
    if partition is None:
        base, remainder = divmod(num_layers, pp_size)
        partition = [base + (pp_size - 1 - remainder <= rank < pp_size - 1) for rank in range(pp_size)]
    if len(partition) != pp_size or sum(partition) != num_layers:
        raise LayoutError(f"layer partition {list(partition)} does not spread {num_layers} layers over {pp_size} ranks")
    start = sum(partition[:pp_rank])
    return range(start, start + partition[pp_rank])
