"""What several destinations of one node need crosses into the node once."""

import numpy as np
import pytest

from hybridrl.errors import ReshardError
from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import MegatronLayout
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.vllm import VllmLayout
from hybridrl.reshard.planner import Planner, lower_bound_bytes
from hybridrl.reshard.pricing import price_plan
from hybridrl.reshard.topology import H100_CLUSTER, LinkClass
from hybridrl.reshard.worlds import Devices, megatron_world, vllm_world
from tests.unit.layout.models import QWEN3_MOE

SPEC = model_spec(QWEN3_MOE)
SOURCES = megatron_world(MegatronLayout(SPEC, ParallelSizes(tp=2, ep=2, dp=2), DType.FLOAT32), Devices(4))
# Four replicas of TP 2 on two other nodes, two of them on each.
DESTINATIONS = vllm_world(VllmLayout(SPEC, 2, DType.FLOAT32), 4, Devices(4, first=4))


def price(*, is_shared):
    plan = Planner(SOURCES, DESTINATIONS, chunk_bytes=4096, is_shared=is_shared).whole()
    return plan, price_plan(plan, H100_CLUSTER, lower_bound_bytes(SOURCES, DESTINATIONS))


def test_replicas_of_a_node_share_what_crosses_the_network():
    (direct_plan, direct), (plan, shared) = price(is_shared=False), price(is_shared=True)
    model_bytes = 4 * sum(int(np.prod(t.shape)) for t in SPEC.tensors().values())
    assert direct_plan.wire_bytes == plan.wire_bytes == lower_bound_bytes(SOURCES, DESTINATIONS)
    assert len(direct_plan.relays) == 0 and direct.link_bytes[LinkClass.NODE] == 0
    # Per node the whole model once, although ranks of a replica hold norms and routers twice.
    assert shared.link_bytes[LinkClass.NETWORK] == 2 * model_bytes
    assert shared.link_bytes[LinkClass.NODE] == direct.wire_bytes - 2 * model_bytes
    assert shared.wire_bytes == direct.wire_bytes and shared.lower_bound_seconds < 0.6 * direct.lower_bound_seconds


def test_destinations_take_turns_at_receiving_and_passing_on():
    plan, shared = price(is_shared=True)
    crossed = [rank.received_bytes[LinkClass.NETWORK] for rank in shared.destinations]
    passed_on = [rank.sent_bytes[LinkClass.NODE] for rank in shared.destinations]
    assert max(crossed) < 1.3 * min(crossed) and max(passed_on) < 1.3 * min(passed_on)
    assert all(plan.destinations[m.source].node == plan.destinations[m.destination].node for m in plan.relays)


def test_a_relay_reads_what_its_peer_received():
    plan, _ = price(is_shared=True)
    received = {(m.destination, m.tensor, m.box): m.write for m in plan.moves}
    assert all(received[m.source, m.tensor, m.box] == m.read for m in plan.relays)


def test_a_plan_with_relays_is_not_executed():
    plan, _ = price(is_shared=True)
    with pytest.raises(ReshardError, match="can be priced but not executed; build it without is_shared"):
        next(iter(plan.messages()))
