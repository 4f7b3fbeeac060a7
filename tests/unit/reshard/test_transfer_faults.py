"""Faults of a transfer: each is caught, names the ranks it concerns, and ends in bounded time."""

import itertools
import socket
import time

import pytest
import torch

from hybridrl.errors import PeerLostError, ReshardError
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.reshard.executor import compare_reports
from hybridrl.reshard.transports import Label, open_transport
from tests.unit.reshard.test_executor import Tampering, flip_bit, sides, swap_rows
from tests.unit.reshard.world import rendezvous, transfer

KINDS = ["shm", "gloo"]
DEADLINE_S = 1.0


def run_with(make, *, kind="shm", rank=0, destination=False, deadline_s=DEADLINE_S, timeout_s=10.0):
    """Transfer to one destination through `make(transport)` on one rank; return the outcomes and the seconds."""
    plan, have, got, _ = sides(destination=ParallelSizes())

    def wrap(transport, **who):
        return make(transport) if who == {"destination" if destination else "source": rank} else transport

    start = time.monotonic()
    outcomes = transfer(plan, have, got, kind, wrap=wrap, deadline_s=deadline_s, timeout_s=timeout_s)
    return plan, outcomes, time.monotonic() - start


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [flip_bit, swap_rows])
def test_damage_to_one_message_is_caught_and_named(kind, fault):
    seen = []

    class Damaged(Tampering):
        def submit_send(self, peer, label, fill):
            def damaged(buffer):
                fill(buffer)
                if not seen:
                    seen.append(1)
                    buffer.copy_(fault(buffer.clone()))

            self.inner.submit_send(peer, label, damaged)

    plan, (sent, received), _ = run_with(lambda transport: Damaged(transport, None), kind=kind, deadline_s=10)
    problems = compare_reports(plan, [r[0] for r in sent], [r[0] for r in received])
    assert len(problems) == 1
    assert "model.embed_tokens.weight: rollout rank 0 holds checksum" in problems[0]
    assert "actor rank 0 sent" in problems[0]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_the_wrong_expert_are_caught_and_both_are_named(kind):
    plan = sides(destination=ParallelSizes())[0]
    chunk, source, (first, second), moves = next(
        (chunk, source, pair, moves)
        for (_, chunk, source), moves in plan.messages()
        for pair in itertools.combinations(moves, 2)
        if all("experts" in move.tensor for move in pair) and pair[0].num_bytes == pair[1].num_bytes
    )
    starts = list(itertools.accumulate((move.num_bytes for move in moves), initial=0))
    a, b = (starts[moves.index(move)] for move in (first, second))
    size = first.num_bytes

    class Exchanged(Tampering):
        def submit_send(self, peer, label, fill):
            def exchanged(buffer):
                fill(buffer)
                if label.chunk == chunk:
                    kept = buffer[a : a + size].clone()
                    buffer[a : a + size] = buffer[b : b + size]
                    buffer[b : b + size] = kept

            self.inner.submit_send(peer, label, exchanged)

    plan, (sent, received), _ = run_with(lambda t: Exchanged(t, None), kind=kind, rank=source, deadline_s=10)
    problems = compare_reports(plan, [r[0] for r in sent], [r[0] for r in received])
    assert {problem.split(":")[0] for problem in problems} == {first.tensor, second.tensor}


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_chunk_is_refused(kind):
    class Truncated(Tampering):
        def submit_send(self, peer, label, fill):
            def part(buffer):
                whole = torch.empty(label.num_bytes, dtype=torch.uint8)
                fill(whole)
                buffer.copy_(whole[: buffer.nbytes])

            self.inner.submit_send(peer, Label(label.version, label.chunk, label.num_bytes - 8), part)

    _, (_, received), seconds = run_with(lambda transport: Truncated(transport, None), kind=kind)
    assert "message from actor rank 0 is Label(version=1, chunk=0" in str(received[0])
    assert "was lost, cut short or is stale" in str(received[0])
    assert seconds < 5


class Dying(Tampering):
    """A rank that ends at one of its messages: with its connections, or silently."""

    def __init__(self, inner, at, is_silent):
        super().__init__(inner, None)
        self.at, self.is_silent, self.count = at, is_silent, 0

    def submit_send(self, peer, label, fill):
        self.count += 1
        number = self.count

        def last(buffer):
            if number > self.at * self.count:
                if self.is_silent:
                    time.sleep(DEADLINE_S + 0.5)
                raise ReshardError("planted")
            fill(buffer)

        self.inner.submit_send(peer, label, last)


@pytest.mark.parametrize("is_silent", [False, True], ids=["closes", "silent"])
@pytest.mark.parametrize("at", [0.0, 0.5, 0.99], ids=["before the first", "in the middle", "before the last"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_dies_is_named_in_bounded_time(kind, at, is_silent):
    _, (sent, received), seconds = run_with(lambda transport: Dying(transport, at, is_silent), kind=kind, rank=3)
    assert str(sent[3]) == "planted"
    assert isinstance(received[0], ReshardError)
    assert "actor rank 3" in str(received[0])
    assert seconds < DEADLINE_S + 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_destination_that_dies_is_named_in_bounded_time(kind):
    class Dead(Tampering):
        def run(self, deadline_s):
            raise ReshardError("planted")

    _, (sent, received), seconds = run_with(lambda transport: Dead(transport, None), kind=kind, destination=True)
    assert str(received[0]) == "planted"
    assert all(isinstance(outcome, ReshardError) and "rollout rank 0" in str(outcome) for outcome in sent)
    assert seconds < DEADLINE_S + 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_never_connects_is_named_in_bounded_time(kind, monkeypatch):
    from tests.unit.reshard import world

    opened = world.open_transport

    def open_all_but_one(meet, plan, *, source=None, destination=None):
        if source == 2:
            raise ReshardError("planted")
        return opened(meet, plan, source=source, destination=destination)

    monkeypatch.setattr(world, "open_transport", open_all_but_one)
    _, (_, received), seconds = run_with(lambda transport: transport, kind=kind, timeout_s=1.0)
    named = {"shm": "actor rank 2 did not attach in time", "gloo": "could not connect to actor rank 2 through"}
    assert named[kind] in str(received[0])
    assert seconds < 10


def test_a_rank_that_cannot_listen_blames_no_peer():
    meet = rendezvous("gloo", 1.0)
    with socket.create_server((meet.host, meet.port)), pytest.raises(ReshardError, match="in use") as caught:
        open_transport(meet, sides()[0], source=0)
    assert not isinstance(caught.value, PeerLostError)
