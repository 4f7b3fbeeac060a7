"""Replies of workers: values in rank order, or one error that names every worker that failed."""

from __future__ import annotations

import pytest

from hybridrl.engines.vllm.messages import Reply, encode, values_of
from hybridrl.errors import EngineError, PeerLostError


def test_values_come_in_rank_order() -> None:
    assert values_of([encode(Reply(1, "b")), encode(Reply(0, "a"))], "shard_map") == ["a", "b"]


def test_failures_name_every_worker_and_end_with_the_traceback_of_the_first_to_fail() -> None:
    cause = Reply(1, None, "KeyError: 'w'", trace="Traceback of worker 1\nKeyError: 'w'\n", failed_at_s=1.0)
    victim = Reply(0, None, "PeerLostError: gone", is_peer_lost=True, trace="Traceback of worker 0", failed_at_s=2.0)
    with pytest.raises(EngineError) as caught:
        values_of([encode(victim), encode(cause), encode(Reply(2, "a"))], "receive")
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "rollout engine: receive failed on 2 of 3 workers; worker 1: KeyError: 'w'; worker 0: PeerLostError: gone"
    )
    assert lines[1:] == ["worker 1, the first to fail:", "Traceback of worker 1", "KeyError: 'w'"]


def test_workers_that_only_lost_their_peers_say_so_by_the_type_of_the_error() -> None:
    replies = [encode(Reply(rank, None, "PeerLostError: gone", is_peer_lost=True)) for rank in range(2)]
    with pytest.raises(PeerLostError, match="receive failed on 2 of 2 workers; worker 0: PeerLostError: gone"):
        values_of(replies, "receive")
