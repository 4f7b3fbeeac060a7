"""A rank that is killed in any phase of a transfer is named by the others, in bounded time; real processes, real transports."""

import contextlib
import multiprocessing
import os
import signal
import socket
import time
import uuid

import pytest
import torch
import torch.distributed as dist

from hybridrl.errors import PeerLostError, ReshardError
from hybridrl.layout.box import Box, DType
from hybridrl.layout.builder import ShardMapBuilder
from hybridrl.layout.shard import CanonicalTensor, Place
from hybridrl.reshard.executor import Receiver, Sender, TensorSink, TransferReport, compare_reports
from hybridrl.reshard.planner import build_plan
from hybridrl.reshard.transports import Rendezvous, gloo, open_transport, remove_leftovers

TENSOR, SHAPE, NUM_SOURCES = "model.norm.weight", (64, 1024), 2
CONNECT_S, DEADLINE_S, SLACK_S = 4.0, 2.0, 6.0
START_S = 3.0  # of the processes
PHASES = ["before connect", "before the first message", "mid-chunk", "before the report"]
JOIN_PHASES = ["in the join, unknown to all", "in the join, while others connect to it"]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.dist.test_transfer_kills"])


@pytest.fixture(scope="module", autouse=True)
def started_server():
    """Have the server of all processes import torch before anything is timed."""
    first = _CONTEXT.Process(target=int)
    first.start()
    first.join()


def shard_map(rows, place):
    builder = ShardMapBuilder(place, {TENSOR: CanonicalTensor(TENSOR, SHAPE)})
    builder.local("local", (len(rows), SHAPE[1]), DType.FLOAT32)
    builder.place_box(TENSOR, Box((rows.start, 0), (rows.stop, SHAPE[1])), "local", (0, 0))
    return builder.build()


def make_plan(kind):
    """Two sources, of which over `mixed` one is on another node, send half a tensor each to one destination, in chunks."""
    nodes = ["a", "b" if kind == "mixed" else "a"]
    sources = [shard_map(range(32 * i, 32 * i + 32), Place("actor", i, nodes[i], f"{i}")) for i in range(NUM_SOURCES)]
    destination = shard_map(range(64), Place("rollout", 0, "a", "9"))
    return build_plan(sources, [destination], chunk_bytes=32 * 1024)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class DoomedStore(dist.Store):
    """The store of a rank that is killed when it has published its address and asks for another's."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def set(self, key, value):
        self.inner.set(key, value)

    def wait(self, keys, timeout):
        die()

    def has_extended_api(self):
        return False


def die_in_join(phase):
    """Have this process killed when gloo connects, with its address published or not."""
    connect = gloo.gloo_group

    def doomed(store, *arguments):
        if phase == JOIN_PHASES[0]:
            die()
        return connect(DoomedStore(store), *arguments)

    gloo.gloo_group = doomed


class Doomed:
    """A transport whose rank is killed in the middle of packing or unpacking its second message."""

    def __init__(self, inner):
        self.inner, self.num_done = inner, 0

    @property
    def staging_bytes(self):
        return self.inner.staging_bytes

    def submit_send(self, peer, label, fill):
        self.inner.submit_send(peer, label, self._doomed(fill))

    def submit_recv(self, peer, label, drain):
        self.inner.submit_recv(peer, label, self._doomed(drain))

    def run(self, deadline_s):
        self.inner.run(deadline_s)

    def close(self):
        self.inner.close()

    def _doomed(self, action):
        def act(buffer):
            self.num_done += 1
            if self.num_done == 2:
                buffer[: buffer.nbytes // 2] = 0
                die()
            action(buffer)

        return act


def rank_main(side, index, phase, rendezvous, answers):
    """Transfer once, dying in `phase` unless it is None, and answer the report or the error."""
    torch.set_num_threads(1)
    plan = make_plan(rendezvous.kind)
    if phase == "before connect":
        die()
    if phase in JOIN_PHASES:
        die_in_join(phase)
    try:
        answers.send(transfer(plan, side, index, phase, rendezvous))
    except ReshardError as e:
        answers.send(e)


def transfer(plan, side, index, phase, rendezvous):
    with contextlib.closing(open_transport(rendezvous, plan, **{side: index})) as transport:
        if phase == "before the first message":
            die()
        used = Doomed(transport) if phase == "mid-chunk" else transport
        if side == "source":
            tensors = {"local": torch.full((32, SHAPE[1]), float(index + 1))}
            report = Sender(plan, index, used).run(tensors, 1, DEADLINE_S)
        else:
            sink = TensorSink({"local": torch.zeros(SHAPE)})
            report = Receiver(plan, index, used).run(sink, 1, DEADLINE_S)
        if phase == "before the report":
            die()
        return report


def run_and_kill(kind, dying, phase):
    """Return the answer of each rank, None of the killed one, and the seconds until the last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous = Rendezvous(kind, uuid.uuid4().hex[:12], "127.0.0.1", port, CONNECT_S)
    ranks = [*(("source", i) for i in range(NUM_SOURCES)), ("destination", 0)]
    start, processes, readers = time.monotonic(), [], []
    try:
        for rank in ranks:
            reader, writer = _CONTEXT.Pipe(duplex=False)
            args = (*rank, phase if rank == dying else None, rendezvous, writer)
            processes.append(_CONTEXT.Process(target=rank_main, args=args, daemon=True))
            processes[-1].start()
            writer.close()
            readers.append(reader)
        answers = [answer(reader, start + 60) for reader in readers]
        seconds = time.monotonic() - start
        processes[ranks.index(dying)].join(5)
        assert processes[ranks.index(dying)].exitcode == -signal.SIGKILL
        return dict(zip(ranks, answers, strict=True)), seconds
    finally:
        for process in processes:
            process.kill()
            process.join()
        remove_leftovers(rendezvous.session)


def answer(reader, deadline):
    assert reader.poll(max(0.0, deadline - time.monotonic())), "a rank hangs"
    try:
        return reader.recv()
    except EOFError:
        return None


@pytest.mark.parametrize("dying", [("source", 1), ("destination", 0)], ids=["source", "destination"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["shm", "gloo", "mixed"])
def test_a_killed_rank_is_named_in_bounded_time(kind, phase, dying):
    plan = make_plan(kind)
    answers, seconds = run_and_kill(kind, dying, phase)
    assert answers.pop(dying) is None
    assert seconds < CONNECT_S + DEADLINE_S + SLACK_S
    name = "actor rank 1" if dying[0] == "source" else "rollout rank 0"
    waiting = [("destination", 0)] if dying[0] == "source" else [("source", 0), ("source", 1)]
    if phase != "before the report":
        for rank in waiting:
            assert isinstance(answers[rank], ReshardError), answers[rank]
            assert name in str(answers[rank])
        return
    nothing = TransferReport({}, 0, {})
    reports = {rank: found if isinstance(found, TransferReport) else nothing for rank, found in answers.items()}
    sent = [reports.get(("source", i), nothing) for i in range(NUM_SOURCES)]
    problems = compare_reports(plan, sent, [reports.get(("destination", 0), nothing)])
    assert problems
    lacking = f"{name} sent nothing" if dying[0] == "source" else f"{name} holds checksum nothing"
    assert all(problem.startswith(TENSOR) for problem in problems)
    assert any(lacking in problem for problem in problems)


@pytest.mark.parametrize(
    ("kind", "phase", "dying"),
    [
        *(("gloo", JOIN_PHASES[0], rank) for rank in (("source", 0), ("source", 1), ("destination", 0))),
        *(("gloo", JOIN_PHASES[1], rank) for rank in (("source", 0), ("destination", 0))),
        ("mixed", JOIN_PHASES[1], ("source", 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)),
)
def test_a_rank_that_is_killed_while_it_connects_is_a_lost_peer_within_the_bound_on_connecting(kind, phase, dying):
    answers, seconds = run_and_kill(kind, dying, phase)
    assert answers.pop(dying) is None
    assert seconds < CONNECT_S + START_S
    name = {"source": "actor", "destination": "rollout"}[dying[0]] + f" rank {dying[1]}"
    for error in answers.values():
        assert type(error) is PeerLostError, error
        assert f"could not connect to {name} through" in str(error)
