"""Calls on a worker: they answer with an error that says what to do, and never raise."""

from __future__ import annotations

import types

import torch

from hybridrl.engines.vllm.messages import Reply, decode, encode
from hybridrl.engines.vllm.requests import ConnectRequest, LearnRequest, ReceiveRequest
from hybridrl.engines.vllm.worker import WorkerExtension
from hybridrl.layout.shard import Place, ShardMap
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.planner import build_plan
from hybridrl.reshard.transports import Rendezvous
from tests.unit.engines.vllm.toy_model import CANONICAL, loaded_toy

MEET = Rendezvous("shm", "session", "127.0.0.1", 1, 0.1)


def worker() -> WorkerExtension:
    extension = WorkerExtension()
    model = loaded_toy()
    extension.rank = 1
    extension.model_runner = types.SimpleNamespace(get_model=lambda: model)
    extension.model_config = types.SimpleNamespace(dtype=torch.float32)
    return extension


def plan_to(*destinations: Place) -> Plan:
    maps = [ShardMap(place, {}, (), {}) for place in (Place("actor", 0, "node", "a"), *destinations)]
    return build_plan(maps[:1], maps[1:])


def test_ranks_are_numbered_through_the_replicas():
    reply: Reply = decode(worker().hybridrl_shard_map(encode(LearnRequest(CANONICAL, 4, "host"))))
    assert reply.rank == 1
    assert reply.value.place == Place("rollout", 5, "host", "rollout-5")


def test_a_plan_for_others_is_refused():
    extension = worker()
    extension.hybridrl_shard_map(encode(LearnRequest(CANONICAL, 0, "host")))
    plan = plan_to(Place("rollout", 7, "host", "rollout-7"))
    reply: Reply = decode(extension.hybridrl_connect(encode(ConnectRequest(MEET, (plan, plan)))))
    assert (
        reply.error == "EngineError: rollout rank 1 is no destination of the plan; expected one of ['rollout rank 7']"
    )


def test_connecting_needs_the_layout():
    reply: Reply = decode(
        worker().hybridrl_connect(encode(ConnectRequest(MEET, (plan_to(Place("rollout", 7, "host", "rollout-7")),))))
    )
    assert reply.error == "EngineError: connect before the layout was learned; ask for the shard map first"
    assert "in hybridrl_connect" in reply.trace and reply.failed_at_s > 0


def test_receiving_needs_a_connection():
    reply: Reply = decode(worker().hybridrl_receive(encode(ReceiveRequest(1, True, 1.0))))
    assert reply.error == "EngineError: receive before connect; connect the replica to the plan's transport first"


def test_disconnecting_twice_is_harmless():
    assert decode(worker().hybridrl_disconnect(encode(None))) == Reply(1)
