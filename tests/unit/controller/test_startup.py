"""Which transport a weight sync takes."""

from __future__ import annotations

import pytest

from hybridrl.config.schema import TransportName
from hybridrl.controller.startup import _transport
from hybridrl.layout.shard import Place, ShardMap


def _maps(*nodes: str) -> list[ShardMap]:
    return [ShardMap(Place("actor", rank, node, f"cpu:{rank}"), {}, (), {}) for rank, node in enumerate(nodes)]


def test_auto_is_shared_memory_inside_a_node_and_gloo_between_nodes() -> None:
    assert _transport(_maps("a", "a", "a"), TransportName.AUTO) is TransportName.SHM
    assert _transport(_maps("a", "a", "b"), TransportName.AUTO) is TransportName.GLOO


@pytest.mark.parametrize("wanted", [TransportName.SHM, TransportName.GLOO])
def test_a_transport_that_is_asked_for_is_taken(wanted: TransportName) -> None:
    assert _transport(_maps("a", "b"), wanted) is wanted
