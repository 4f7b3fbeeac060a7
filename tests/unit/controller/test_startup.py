"""Which transport a weight sync takes, and what is left of it."""

from __future__ import annotations

import pytest

from hybridrl.config.schema import TransportName
from hybridrl.controller.startup import _transport, sync_session
from hybridrl.errors import EngineError
from hybridrl.layout.shard import Place, ShardMap
from hybridrl.reshard.transports import SHARED_MEMORY


def _maps(*nodes: str) -> list[ShardMap]:
    return [ShardMap(Place("actor", rank, node, f"cpu:{rank}"), {}, (), {}) for rank, node in enumerate(nodes)]


def test_auto_is_shared_memory_inside_a_node_and_gloo_between_nodes() -> None:
    assert _transport(_maps("a", "a", "a"), TransportName.AUTO) is TransportName.SHM
    assert _transport(_maps("a", "a", "b"), TransportName.AUTO) is TransportName.GLOO


@pytest.mark.parametrize("wanted", [TransportName.SHM, TransportName.GLOO])
def test_a_transport_that_is_asked_for_is_taken(wanted: TransportName) -> None:
    assert _transport(_maps("a", "a"), wanted) is wanted


def test_shared_memory_between_nodes_is_refused_before_anything_connects() -> None:
    with pytest.raises(EngineError, match=r"transport: shm, but actor and rollout run on 2 nodes.*use auto or gloo"):
        _transport(_maps("a", "b", "b"), TransportName.SHM)


def test_a_session_takes_its_own_shared_memory_with_it_and_no_other() -> None:
    with pytest.raises(EngineError), sync_session() as session, sync_session() as other:
        left = [SHARED_MEMORY / f"hybridrl-{session}-0-1", SHARED_MEMORY / f"hybridrl-{session}-0-2.new"]
        for path in left:
            path.touch()
        with sync_session():
            pass
        assert other != session and all(path.exists() for path in left)
        raise EngineError("a rank died while it connected")
    assert not any(path.exists() for path in left)
