"""Transports: which is chosen, what each needs, routing per peer, staging bounds, and replicas that come and go."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from hybridrl.errors import ReshardError
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.reshard.executor import Receiver, Sender, TensorSink, compare_reports
from hybridrl.reshard.planner import Planner, build_plan
from hybridrl.reshard.transport_choice import choose_transport
from hybridrl.reshard.transports import Endpoint, open_transport
from hybridrl.reshard.transports.inbox import HEADER_BYTES, inboxes
from tests.unit.reshard.test_executor import CANONICAL, GENERATION, TRAINING, equal, sides
from tests.unit.reshard.test_planner import world
from tests.unit.reshard.world import empty_tensors, filled_tensors, rendezvous, transfer


def placed(maps, nodes):
    return [replace(m, place=replace(m.place, node=node)) for m, node in zip(maps, nodes, strict=True)]


def two_nodes(chunk_bytes=9000):
    """Four sources on nodes a, a, b, b and two destinations on a and b: each destination hears from both nodes."""
    sources = placed(world(TRAINING, "actor"), "aabb")
    destinations = placed(world(GENERATION, "rollout", first_device=100), "ab")
    plan = build_plan(sources, destinations, chunk_bytes=chunk_bytes)
    have = [filled_tensors(m, CANONICAL) for m in sources]
    want = [filled_tensors(m, CANONICAL) for m in destinations]
    return plan, have, [empty_tensors(m) for m in destinations], want


def test_auto_goes_by_place():
    plan = sides()[0]
    far = two_nodes()[0]
    apart, together = (
        replace(far, destinations=tuple(replace(p, node=node) for p, node in zip(far.destinations, nodes, strict=True)))
        for nodes in ("cd", "cc")
    )
    assert choose_transport(plan.sources, plan.destinations, is_cuda=False) == "shm"
    assert choose_transport(plan.sources, plan.destinations, is_cuda=True) == "cuda_ipc"
    assert choose_transport(far.sources, far.destinations, is_cuda=False) == "mixed"
    assert choose_transport(apart.sources, apart.destinations, is_cuda=False) == "gloo"
    assert choose_transport(together.sources, together.destinations, is_cuda=False) == "mixed"
    assert choose_transport(far.sources, far.destinations, is_cuda=True) == "nccl"


def test_unknown_kind_lists_the_known_ones():
    with pytest.raises(ReshardError, match="'pigeon' is unknown; expected one of shm, gloo, mixed, nccl, cuda_ipc"):
        open_transport(rendezvous("pigeon", 1), sides()[0], source=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a device")
@pytest.mark.parametrize("kind", ["nccl", "cuda_ipc"])
def test_device_transports_say_what_they_need(kind):
    with pytest.raises(ReshardError, match=f"actor rank 0: transport {kind} needs CUDA, but torch sees no device"):
        open_transport(rendezvous(kind, 1), sides()[0], source=0)


def test_mixed_routes_each_pair_by_its_node_and_stays_exact():
    plan, have, got, want = two_nodes()
    pairs = {plan.sources[m.source].node == plan.destinations[m.destination].node for m in plan.moves}
    assert pairs == {True, False}
    sent, received = transfer(plan, have, got, "mixed", versions=(1, 2))
    assert equal(got, want)
    for version in range(2):
        assert compare_reports(plan, [r[version] for r in sent], [r[version] for r in received]) == []


def test_a_failure_on_one_way_of_mixed_is_named():
    plan, have, got, _ = two_nodes()

    def wrap(transport, source=None, destination=None):
        if source == 3:
            transport.close()
        return transport

    _, received = transfer(plan, have, got, "mixed", wrap=wrap, deadline_s=2)
    assert all(isinstance(outcome, ReshardError) for outcome in received)
    assert any("actor rank 3" in str(outcome) for outcome in received)


@pytest.mark.parametrize("kind", ["shm", "gloo", "mixed"])
def test_staging_stays_within_two_chunks(kind):
    chunk_bytes = 30_000
    plan, have, got, _ = two_nodes(chunk_bytes)
    sent, received = transfer(plan, have, got, kind)
    bound = 2 * (chunk_bytes + len(plan.sources) * 2 * HEADER_BYTES)
    for rank in (*sent, *received):
        assert 0 <= rank[0].staging_bytes <= bound * (2 if kind == "mixed" else 1)
    assert all(rank[0].staging_bytes > 0 for rank in received)


def test_inbox_of_the_worked_example():
    plan = sides()[0]
    inbox = inboxes(Endpoint(plan, 0, is_source=False))[0]
    for (chunk, source), offset in inbox.offsets.items():
        assert offset % 64 == 0
        assert offset + inbox.sizes[chunk, source] <= inbox.half_bytes
    for source in range(4):
        assert inboxes(Endpoint(plan, source, is_source=True))[0] == inbox


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_moves_inside_a_process_need_no_message(kind):
    """Sources 0 and 1 are colocated with the destinations: what they hold is copied, the rest travels."""
    sources = world(TRAINING, "actor")
    destinations = [
        replace(m, place=replace(m.place, device=sources[i].place.device, node=sources[i].place.node))
        for i, m in enumerate(world(GENERATION, "rollout"))
    ]
    plan = build_plan(sources, destinations, chunk_bytes=9000)
    have = [filled_tensors(m, CANONICAL) for m in sources]
    got, want = ([make(m) for m in destinations] for make in (empty_tensors, lambda m: filled_tensors(m, CANONICAL)))
    meet = rendezvous(kind, 10)

    def source_rank(index):
        local = [index] if index < 2 else []
        sender = Sender(plan, index, open_transport(meet, plan, source=index), local=local)
        return sender.run(have[index], 1, 10)

    def destination_rank(index):
        transport = open_transport(meet, plan, destination=index)
        return Receiver(plan, index, transport, held={index: have[index]}).run(TensorSink(got[index]), 1, 10)

    with ThreadPoolExecutor(6) as pool:
        sent = [pool.submit(source_rank, i) for i in range(4)]
        received = [pool.submit(destination_rank, i) for i in range(2)]
        reports = [[future.result() for future in side] for side in (sent, received)]
    assert equal(got, want)
    assert compare_reports(plan, *reports) == []
    assert sum(r.wire_bytes for r in reports[1]) == plan.wire_bytes
    assert plan.wire_bytes < sum(move.num_bytes for move in plan.moves)


def test_a_replica_leaves_and_another_joins_while_the_sources_stay():
    sources = world(TRAINING, "actor")
    replicas = [world(ParallelSizes(), "rollout", first_device=100 + i)[0] for i in range(3)]
    replicas = [replace(m, place=replace(m.place, rank=i)) for i, m in enumerate(replicas)]
    have = [filled_tensors(m, CANONICAL) for m in sources]
    for version, members in enumerate([(0, 1), (0,), (0, 2)], start=1):
        maps = [replicas[i] for i in members]
        plan = build_plan(sources, maps, chunk_bytes=20_000)
        got, want = ([make(m) for m in maps] for make in (empty_tensors, lambda m: filled_tensors(m, CANONICAL)))
        sent, received = transfer(plan, have, got, "shm", versions=(version,))
        assert equal(got, want)
        assert compare_reports(plan, [r[0] for r in sent], [r[0] for r in received]) == []


def test_a_part_of_a_plan_is_no_ground_for_an_inbox():
    sources, destinations = world(TRAINING, "actor"), world(GENERATION, "rollout", first_device=100)
    part = Planner(sources, destinations, chunk_bytes=9000).for_source(0)
    with pytest.raises(ReshardError, match="the plan holds only a part of what rollout rank 0 receives"):
        inboxes(Endpoint(part, 0, is_source=True))
