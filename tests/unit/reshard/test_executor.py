"""Transfers over the real transports: exact bytes, agreeing checksums, and faults that are caught and named."""

import pytest
import torch

from hybridrl.errors import ReshardError
from hybridrl.layout.box import DType
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.reshard.executor import compare_reports
from hybridrl.reshard.planner import build_plan
from tests.unit.layout.models import random_canonical
from tests.unit.reshard.test_planner import SPEC, world
from tests.unit.reshard.world import empty_tensors, filled_tensors, transfer

CANONICAL = random_canonical(SPEC)


TRAINING, GENERATION = ParallelSizes(tp=2, pp=2, ep=2), ParallelSizes(tp=2)


def sides(source=TRAINING, destination=GENERATION, dtype=DType.FLOAT32, chunk_bytes=9000):
    sources, destinations = world(source, "actor"), world(destination, "rollout", dtype, first_device=100)
    plan = build_plan(sources, destinations, chunk_bytes=chunk_bytes)
    have = [filled_tensors(m, CANONICAL) for m in sources]
    got = [empty_tensors(m) for m in destinations]
    want = [filled_tensors(m, CANONICAL) for m in destinations]
    return plan, have, got, want


def equal(got, want):
    return all(
        torch.equal(g[name].nan_to_num(7), w[name].nan_to_num(7)) for g, w in zip(got, want, strict=True) for name in w
    )


@pytest.mark.parametrize("kind", ["shm", "gloo"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda d: d.value)
def test_transfer_is_exact_and_checksums_agree(kind, dtype):
    plan, have, got, want = sides(dtype=dtype)
    sent, received = transfer(plan, have, got, kind, versions=(1, 2))
    assert equal(got, want)
    for version in range(2):
        reports = [[rank[version] for rank in side] for side in (sent, received)]
        assert compare_reports(plan, *reports) == []
        assert sum(r.wire_bytes for r in reports[0]) == sum(r.wire_bytes for r in reports[1]) == plan.wire_bytes
        assert len(reports[0][0].checksums) > 10


def test_transposed_replicas_and_uneven_degrees():
    plan, have, got, want = sides(ParallelSizes(dp=4, ep=4), ParallelSizes(tp=4, dp=1, ep=2, etp=2))
    transfer(plan, have, got, "shm")
    assert equal(got, want)


class Tampering:
    """A transport whose receipts go through a fault."""

    def __init__(self, inner, fault):
        self.inner, self.fault = inner, fault

    @property
    def staging_bytes(self):
        return self.inner.staging_bytes

    def submit_send(self, peer, label, fill):
        self.inner.submit_send(peer, label, fill)

    def submit_recv(self, peer, label, drain):
        self.inner.submit_recv(peer, label, lambda buffer: drain(self.fault(buffer.clone())))

    def run(self, deadline_s):
        self.inner.run(deadline_s)

    def close(self):
        self.inner.close()


def flip_bit(buffer):
    buffer[5] ^= 16
    return buffer


def swap_rows(buffer):
    return torch.cat([buffer[128:256], buffer[:128], buffer[256:]])


@pytest.mark.parametrize("fault", [flip_bit, swap_rows])
def test_corrupted_message_is_caught_and_named(fault):
    plan, have, got, _ = sides(destination=ParallelSizes())
    once = []

    def wrap(transport, source=None, destination=None):
        def first_only(buffer):
            if once:
                return buffer
            once.append(1)
            return fault(buffer)

        return transport if destination is None else Tampering(transport, first_only)

    sent, received = transfer(plan, have, got, "shm", wrap=wrap)
    problems = compare_reports(plan, [r[0] for r in sent], [r[0] for r in received])
    assert problems
    assert "model.embed_tokens.weight: rollout rank 0 holds checksum" in problems[0]
    assert "actor rank 0 sent" in problems[0]


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_stale_version_is_refused(kind):
    plan, have, got, _ = sides(destination=ParallelSizes())

    class Stale(Tampering):
        def submit_send(self, peer, label, fill):
            self.inner.submit_send(peer, type(label)(label.version - 1, label.chunk, label.num_bytes), fill)

    def wrap(transport, source=None, destination=None):
        return Stale(transport, None) if source == 0 else transport

    _, received = transfer(plan, have, got, kind, wrap=wrap, deadline_s=2)
    assert isinstance(received[0], ReshardError)
    assert "message from actor rank 0 is Label(version=0" in str(received[0])


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_missing_message_ends_in_bounded_time(kind):
    plan, have, got, _ = sides(destination=ParallelSizes())

    class Silent(Tampering):
        def submit_send(self, peer, label, fill):
            if label.chunk != 1:
                self.inner.submit_send(peer, label, fill)

    def wrap(transport, source=None, destination=None):
        return Silent(transport, None) if source == 0 else transport

    _, received = transfer(plan, have, got, kind, wrap=wrap, deadline_s=1)
    assert isinstance(received[0], ReshardError)
    assert "actor rank" in str(received[0])


def test_peer_that_closes_ends_the_other_side_at_once():
    plan, have, got, _ = sides(destination=ParallelSizes())

    class Dying(Tampering):
        def run(self, deadline_s):
            raise ReshardError("planted")

    def wrap(transport, source=None, destination=None):
        return Dying(transport, None) if source == 0 else transport

    _, received = transfer(plan, have, got, "shm", wrap=wrap, deadline_s=30)
    assert "actor rank 0 closed its side" in str(received[0])


def test_destination_without_room_in_shared_memory_is_named(monkeypatch):
    plan, have, got, _ = sides(destination=ParallelSizes())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    sent, received = transfer(plan, have, got, "shm", deadline_s=1, timeout_s=1)
    assert "bytes of shared memory in /dev/shm (No space left on device)" in str(received[0])
    assert "rollout rank 0 did not attach in time" in str(sent[0])
