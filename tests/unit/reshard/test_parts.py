"""Plans cut into parts: executing the parts is executing the plan."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
import torch

from hybridrl.reshard.executor import Receiver, Sender, TensorSink, compare_reports
from hybridrl.reshard.parts import cut_plan
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.transports import Endpoint, open_transport
from hybridrl.reshard.transports.inbox import inboxes
from tests.unit.reshard import test_sharing
from tests.unit.reshard.test_transports import CANONICAL, GENERATION, TRAINING, world
from tests.unit.reshard.world import empty_tensors, filled_tensors, rendezvous


@pytest.fixture(params=[False, True])
def planner(request):
    maps = world(TRAINING, "actor"), world(GENERATION, "rollout", first_device=100)
    return maps, Planner(*maps, chunk_bytes=9000, is_staggered=request.param)


def test_the_parts_of_either_side_make_up_the_whole(planner):
    _, planner = planner
    whole, parts = planner.whole(), cut_plan(planner)
    for side in (parts.of_source, parts.of_destination):
        moves = chain.from_iterable(part.moves for part in side)
        assert sorted(moves, key=repr) == sorted(whole.moves, key=repr)
    assert parts.wire_bytes == whole.wire_bytes


def test_a_source_lays_inboxes_out_from_its_part_as_the_destination_does(planner):
    _, planner = planner
    parts = cut_plan(planner)
    own = {d: inboxes(Endpoint(part, d, is_source=False))[d] for d, part in enumerate(parts.of_destination)}
    for source, part in enumerate(parts.of_source):
        found = inboxes(Endpoint(part, source, is_source=True))
        assert found == {destination: own[destination] for destination in found} and found


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_parts_alone_carry_a_transfer_out(planner, kind):
    carry_out(*planner, kind, CANONICAL)


@pytest.mark.parametrize("is_staggered", [False, True])
def test_parts_alone_carry_relays_out(is_staggered):
    maps = test_sharing.SOURCES, test_sharing.DESTINATIONS
    planner = Planner(*maps, chunk_bytes=3000, is_staggered=is_staggered, is_shared=True)
    whole, parts = planner.whole(), cut_plan(planner)
    assert parts.wire_bytes == whole.wire_bytes and len(whole.relays) > 0
    relays = {repr(relay) for part in parts.of_destination for relay in part.relays}
    assert relays == {repr(relay) for relay in whole.relays}
    carry_out(maps, planner, "mixed", test_sharing.CANONICAL)


def carry_out(maps, planner, kind, canonical):
    """Give every rank its part only, run one transfer, and check what arrived."""
    (sources, destinations), parts, meet = maps, cut_plan(planner), rendezvous(kind, 10)
    have = [filled_tensors(m, canonical) for m in sources]
    got = [empty_tensors(m) for m in destinations]

    def send(index):
        part = parts.of_source[index]
        return Sender(part, index, open_transport(meet, part, source=index)).run(have[index], 1, 10)

    def receive(index):
        part = parts.of_destination[index]
        transport = open_transport(meet, part, destination=index)
        return Receiver(part, index, transport).run(TensorSink(got[index]), 1, 10)

    with ThreadPoolExecutor(len(sources) + len(destinations)) as pool:
        sent = [pool.submit(send, i) for i in range(len(sources))]
        received = [pool.submit(receive, i) for i in range(len(destinations))]
        reports = [[future.result() for future in side] for side in (sent, received)]
    assert compare_reports(parts, *reports) == []
    for tensors, shard_map in zip(got, destinations, strict=True):
        want = filled_tensors(shard_map, canonical)
        assert all(torch.equal(tensors[n].nan_to_num(7), want[n].nan_to_num(7)) for n in want)
