"""Which transport a connection takes."""

from __future__ import annotations

import pytest

from hybridrl.config.choices import Platform, TransportName
from hybridrl.controller.connection import transport_kind
from hybridrl.errors import EngineError
from hybridrl.layout.shard import Place


def _kind(sources: str, destinations: str, wanted: TransportName, platform: Platform = Platform.CPU) -> str:
    """Choose for ranks on nodes of one letter each."""
    sides = [
        [Place(role, i, node, f"{role}:{i}") for i, node in enumerate(nodes)]
        for role, nodes in (("actor", sources), ("rollout", destinations))
    ]
    return transport_kind(*sides, wanted, platform)


@pytest.mark.parametrize(
    ("sources", "destinations", "platform", "kind"),
    [
        ("aa", "a", Platform.CPU, "shm"),
        ("aa", "b", Platform.CPU, "gloo"),
        ("ab", "b", Platform.CPU, "mixed"),
        ("aa", "a", Platform.CUDA, "cuda_ipc"),
        ("aa", "b", Platform.CUDA, "nccl"),
    ],
)
def test_auto_takes_the_shortest_way_of_each_pair(
    sources: str, destinations: str, platform: Platform, kind: str
) -> None:
    assert _kind(sources, destinations, TransportName.AUTO, platform) == kind


@pytest.mark.parametrize("wanted", [name for name in TransportName if name is not TransportName.AUTO])
def test_a_transport_that_is_asked_for_is_taken(wanted: TransportName) -> None:
    assert _kind("a", "a", wanted) == wanted.value


@pytest.mark.parametrize("wanted", [TransportName.SHM, TransportName.CUDA_IPC])
def test_what_stays_inside_a_node_is_refused_between_nodes(wanted: TransportName) -> None:
    with pytest.raises(EngineError, match=f"transport: {wanted.value}, but actor and rollout run on 2 nodes.*use auto"):
        _kind("a", "bb", wanted)
