"""Which transport a plan gets when the configuration says auto: a pure choice, which a prediction makes as a run does."""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.layout.shard import Place


def choose_transport(sources: Sequence[Place], destinations: Sequence[Place], *, is_cuda: bool) -> str:
    """Return the kind for weight_sync.transport auto.

    Inside a node shm, or cuda_ipc between devices; between nodes gloo, or nccl. A CPU plan with both kinds of pairs routes each
    by its own way (mixed), as do destinations that share a node away from the sources, since they may relay.
    """
    nodes = {place.node for place in (*sources, *destinations)}
    if is_cuda:
        return "cuda_ipc" if len(nodes) == 1 else "nccl"
    if len(nodes) == 1:
        return "shm"
    taking = [place.node for place in destinations]
    is_mixed = len(set(taking)) < len(taking) or bool({place.node for place in sources} & set(taking))
    return "mixed" if is_mixed else "gloo"
