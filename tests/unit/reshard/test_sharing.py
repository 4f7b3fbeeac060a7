"""What several destinations of one node need crosses into the node once."""

import numpy as np
import pytest

from hybridrl.errors import ReshardError
from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import MegatronLayout
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.vllm import VllmLayout
from hybridrl.reshard.executor import compare_reports
from hybridrl.reshard.planner import Planner, build_plan, lower_bound_bytes
from hybridrl.reshard.pricing import price_plan
from hybridrl.reshard.topology import H100_CLUSTER, LinkClass
from hybridrl.reshard.transport_choice import choose_transport
from hybridrl.reshard.transports.gloo import GlooTransport
from hybridrl.reshard.transports.inbox import HEADER_BYTES
from hybridrl.reshard.worlds import Devices, megatron_world, vllm_world
from tests.unit.layout.models import QWEN3_MOE, random_canonical
from tests.unit.reshard.simulation import count_per_node
from tests.unit.reshard.test_executor import equal
from tests.unit.reshard.world import empty_tensors, filled_tensors, transfer

SPEC = model_spec(QWEN3_MOE)
CANONICAL = random_canonical(SPEC)
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


def test_destinations_of_a_node_pass_on_in_the_chunk_in_which_they_receive():
    for is_staggered in (False, True):
        plan = Planner(SOURCES, DESTINATIONS, chunk_bytes=3000, is_staggered=is_staggered, is_shared=True).whole()
        received = {(m.destination, m.tensor, m.box): m.chunk for m in plan.moves}
        assert all(received[m.source, m.tensor, m.box] == m.chunk for m in plan.relays)
        assert max(m.chunk for m in plan.relays) > 3


def test_what_a_relay_would_widen_is_taken_directly():
    wide = vllm_world(VllmLayout(SPEC, 2, DType.FLOAT32), 4, Devices(4, first=4))
    narrow = megatron_world(MegatronLayout(SPEC, ParallelSizes(tp=2), DType.BFLOAT16), Devices(4))
    plan = Planner(narrow, wide, is_shared=True).whole()
    assert len(plan.relays) == 0 and plan.wire_bytes == lower_bound_bytes(narrow, wide)


@pytest.fixture
def between_nodes(monkeypatch):
    """Count what gloo, which connects nodes, is told to send."""
    sizes = []

    def submit_send(self, destination, label, fill, submit=GlooTransport.submit_send):
        sizes.append(label.num_bytes)
        submit(self, destination, label, fill)

    monkeypatch.setattr(GlooTransport, "submit_send", submit_send)
    return sizes


def fake_nodes(**options):
    """Return a plan and the tensors of its ranks: sources on one node, four replicas of TP 2 on two others."""
    plan = build_plan(SOURCES, DESTINATIONS, chunk_bytes=3000, is_shared=True, **options)
    have = [filled_tensors(m, CANONICAL) for m in SOURCES]
    got = [empty_tensors(m) for m in DESTINATIONS]
    return plan, have, got, [filled_tensors(m, CANONICAL) for m in DESTINATIONS]


@pytest.mark.parametrize("is_staggered", [False, True])
def test_nodes_that_share_receive_each_byte_once_and_relay_it(between_nodes, is_staggered):
    plan, have, got, want = fake_nodes(is_staggered=is_staggered)
    assert choose_transport(plan.sources, plan.destinations, is_cuda=False) == "mixed"
    sent, received = transfer(plan, have, got, "mixed", versions=(1, 2))
    assert equal(got, want)
    bounds = count_per_node(SOURCES, DESTINATIONS, CANONICAL)
    assert sum(between_nodes) == 2 * sum(bounds.values())
    for version in range(2):
        sources, destinations = ([rank[version] for rank in side] for side in (sent, received))
        assert compare_reports(plan, sources, destinations) == []
        assert sum(len(report.relayed) for report in destinations) > len(CANONICAL)
        assert sum(report.network_bytes for report in sources) == sum(bounds.values()) == plan.network_bytes
        assert sum(report.wire_bytes for report in destinations) == lower_bound_bytes(SOURCES, DESTINATIONS)
        for node, bound in bounds.items():
            inside = [r for r, place in zip(destinations, plan.destinations, strict=True) if place.node == node]
            assert sum(report.network_bytes for report in inside) == bound
        # One way carries from nodes, the other inside: each has two halves of one chunk.
        assert max(report.staging_bytes for report in destinations) <= 2 * 2 * (3000 + 12 * 2 * HEADER_BYTES)


def test_shared_memory_alone_carries_relays():
    plan, have, got, want = fake_nodes()
    sent, received = transfer(plan, have, got, "shm")
    assert equal(got, want)
    assert compare_reports(plan, [r[0] for r in sent], [r[0] for r in received]) == []


def test_a_damaged_relay_names_who_passed_it_on():
    plan, have, got, _ = fake_nodes()
    relay = plan.relays[0]

    def wrap(transport, source=None, destination=None):
        return Damaging(transport) if destination == relay.source else transport

    sent, received = transfer(plan, have, got, "shm", wrap=wrap)
    mismatches = compare_reports(plan, [r[0] for r in sent], [r[0] for r in received])
    assert mismatches and all(f"{plan.destinations[relay.source]} sent" in line for line in mismatches)


class Damaging:
    """A transport that flips a bit of everything it sends."""

    def __init__(self, transport):
        self._transport = transport

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def submit_send(self, destination, label, fill):
        def damaging(buffer):
            fill(buffer)
            buffer[0] ^= 1

        self._transport.submit_send(destination, label, damaging)


def test_a_destination_that_dies_is_named_by_those_that_it_relays_to():
    plan, have, got, _ = fake_nodes()
    dead = plan.relays[0].source

    def wrap(transport, source=None, destination=None):
        if destination == dead:
            transport.close()
            raise ReshardError("died")
        return transport

    _, received = transfer(plan, have, got, "shm", wrap=wrap, deadline_s=5)
    taker = plan.relays[0].destination
    assert isinstance(received[taker], ReshardError) and str(plan.destinations[dead]) in str(received[taker])
    assert all(isinstance(outcome, ReshardError) for outcome in received[:4])


def test_gloo_alone_says_that_it_does_not_relay():
    plan, have, got, _ = fake_nodes()
    outcomes = transfer(plan, have, got, "gloo", timeout_s=1, deadline_s=1)
    assert any("takes weights from other destinations of its node" in str(outcome) for outcome in outcomes[1])
