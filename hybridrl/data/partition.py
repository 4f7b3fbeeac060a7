"""Cuts items of unequal cost into parts of nearly equal cost, by Karmarkar and Karp's largest differencing method.

Each item starts as a partition of its own with one filled part. The two partitions that are least even are merged, the
fullest part of one with the emptiest of the other, until one is left. On skewed lengths this comes closer to equal parts
than placing the dearest item first; both are deterministic.

Source: Karmarkar and Karp, The differencing method of set partitioning, 1982.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Items = NDArray[np.int64]


def balanced_parts(costs: Sequence[float] | NDArray[np.float64], num_parts: int) -> list[Items]:
    """Return the items of each part in ascending order, parts from dear to cheap; parts are empty when items run out.

    Worked example: costs 8, 7, 6, 5 and 4 in 2 parts. 8 - 7 and 6 - 5 leave differences of 1 and 1, 4 - 1 leaves 3, and 3 - 1
    leaves 2: the parts cost 16 and 14.

    Args:
        costs: [num_items]; not negative.
        num_parts: At least 1.
    """
    if not len(costs):
        return [np.zeros(0, dtype=np.int64) for _ in range(num_parts)]
    if num_parts == 1:
        return [np.arange(len(costs))]
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * num_parts
    # Heap of (-spread, first item, parts from dear to cheap); the first item makes the order total.
    heap = [(-float(cost), item, [(float(cost), [item]), *empty[1:]]) for item, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        merged = [(a + b, items + more) for (a, items), (b, more) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(first, second), merged))
    return [np.array(sorted(items), dtype=np.int64) for _, items in heap[0][2]]
