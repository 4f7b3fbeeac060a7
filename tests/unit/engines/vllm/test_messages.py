"""Replies of workers: values in rank order, or one error that names every worker that failed."""

from __future__ import annotations

import pytest

from hybridrl.engines.vllm.messages import Reply, encode, values_of
from hybridrl.errors import EngineError


def test_values_come_in_rank_order() -> None:
    assert values_of([encode(Reply(1, "b")), encode(Reply(0, "a"))], "shard_map") == ["a", "b"]


def test_failures_name_every_worker() -> None:
    replies = [encode(Reply(0, "a")), encode(Reply(1, error="ReshardError: peer is gone"))]
    with pytest.raises(EngineError, match="receive failed on 1 of 2 workers; worker 1: ReshardError: peer is gone"):
        values_of(replies, "receive")
