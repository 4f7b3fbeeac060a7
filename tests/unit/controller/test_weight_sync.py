"""The sync protocol on fakes: order, retry, failure, and what is never done after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from hybridrl.config.choices import Platform, Precision
from hybridrl.config.schema import WeightSyncConfig
from hybridrl.controller.connection import Connector
from hybridrl.controller.probe import Probe, make_probe
from hybridrl.controller.weight_sync import WeightSyncer
from hybridrl.data.batch import SequenceBatch
from hybridrl.data.generation import Completion
from hybridrl.data.sample import FinishReason
from hybridrl.errors import EngineError, WeightSyncError
from hybridrl.layout.box import Box, DType
from hybridrl.layout.shard import CanonicalTensor, LocalTensor, Place, Shard, ShardMap
from hybridrl.reshard.executor import PieceKey, TransferReport
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.transports import Rendezvous
from hybridrl.roles.failure import Failure, FailureKind
from tests.unit.controller.fakes import FakeFuture, FakeLogprobs

NAME = "model.norm.weight"


def _map(role: str, rank: int) -> ShardMap:
    place = Place(role, rank, "host", f"{role}:{rank}")
    shard = Shard(NAME, Box((0,), (8,)), "w", 0, (1,))
    tensors = {"w": LocalTensor("w", (8,), DType.FLOAT32)}
    return ShardMap(place, tensors, (shard,), {NAME: CanonicalTensor(NAME, (8,))})


SOURCES, DESTINATIONS = [_map("actor", 0)], [_map("rollout", 0)]
PROBE = Probe((5, 6), 0.25)


def _report(checksum: int | None, num_destinations: int = 1) -> TransferReport:
    keys = [PieceKey(NAME, 0, destination) for destination in range(num_destinations)]
    return TransferReport(
        {} if checksum is None else dict.fromkeys(keys, checksum), 32, {"copy": 0.0, "checksum": 0.002, "total": 0.01}
    )


@dataclass
class Roles:
    """Both sides; `received` are the checksums that arrive in successive attempts (7 is what was sent)."""

    received: Sequence[int | None] = (7, 7)
    sent: int | None = 7
    send_failures: Sequence[Failure] = ()
    diary: list[str] = field(default_factory=list)
    attempts: int = 0
    num_replicas: int = 1
    dp_size: int = 2
    connections: list[tuple[Rendezvous, Sequence[Plan]]] = field(default_factory=list)
    replica_logprobs: Sequence[float] = (-1.0,)
    probed_rows: int = 0

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def connect_sync(self, rendezvous: Rendezvous, parts: Sequence[Plan], **settings: object) -> FakeFuture[None]:
        self.connections.append((rendezvous, parts))
        return FakeFuture(lambda: None)

    def probe(self, token_ids: Sequence[int], num_tokens: int, timeout_s: float) -> FakeFuture[list[Completion]]:
        self._note("probe")
        answers = [Completion((7, 8), (-1.0, value), FinishReason.LENGTH, 0) for value in self.replica_logprobs]
        return FakeFuture(lambda: answers)

    def logprobs(self, batch: SequenceBatch) -> FakeFuture[FakeLogprobs]:
        assert np.array_equal(batch.token_ids, [[5, 6, 7, 8]] * batch.num_samples)
        self.probed_rows = batch.num_samples
        return FakeFuture(lambda: FakeLogprobs.constant(batch, -1.0))

    def _note(self, entry: str) -> FakeFuture[None]:
        self.diary.append(entry)
        return FakeFuture(lambda: None)

    def pause(self, timeout_s: float) -> FakeFuture[None]:
        return self._note("pause")

    def send_weights(self, version: int, timeout_s: float) -> FakeFuture[list[TransferReport]]:
        self._note(f"send v{version}")
        return FakeFuture(lambda: [_report(self.sent, self.num_replicas)], self.send_failures)

    def receive_weights(self, version: int, *, verify: bool, timeout_s: float) -> FakeFuture[list[TransferReport]]:
        self._note(f"receive v{version}")
        self.attempts += 1
        return FakeFuture(lambda: [_report(self.received[self.attempts - 1])])

    def commit(self, version: int, timeout_s: float) -> FakeFuture[None]:
        return self._note(f"commit v{version}")

    def resume(self, timeout_s: float) -> FakeFuture[None]:
        return self._note("resume")


def _syncer(roles: Roles, **settings: object) -> WeightSyncer:
    config = WeightSyncConfig(**settings)
    connector = Connector(roles, roles, SOURCES, config, Platform.CPU, "session")
    syncer = WeightSyncer(roles, roles, connector, config, PROBE)
    syncer.connect(DESTINATIONS)
    return syncer


def test_a_sync_pauses_transfers_commits_and_resumes_in_this_order() -> None:
    roles = Roles()
    report = _syncer(roles).sync(4)
    assert roles.diary == ["pause", "send v4", "receive v4", "commit v4", "resume", "probe"]
    assert (report.is_verified, report.num_retries, report.wire_bytes, report.lower_bound_bytes) == (True, 0, 32, 32)
    assert report.checksum_seconds == 0.002
    assert report.metrics()["weight_sync/wire_bytes"] == 32


def test_a_mismatch_is_retried_once_and_then_committed() -> None:
    roles = Roles(received=(8, 7))
    report = _syncer(roles).sync(1)
    assert roles.diary == ["pause", "send v1", "receive v1", "send v1", "receive v1", "commit v1", "resume", "probe"]
    assert report.num_retries == 1 and report.wire_bytes == 32


def test_two_mismatches_name_tensor_and_ranks_and_leave_the_replicas_paused_at_the_old_version() -> None:
    roles = Roles()
    syncer = _syncer(roles)
    syncer.sync(1)
    roles.received, roles.attempts, roles.diary = (8, 8), 0, []
    with pytest.raises(WeightSyncError) as caught:
        syncer.sync(2)
    message = str(caught.value)
    assert "weight sync of version 2: checksums differ after 2 attempts, so version 1 stays in force" in message
    assert NAME in message and "actor rank 0" in message and "rollout rank 0" in message
    assert roles.diary == ["pause", "send v2", "receive v2", "send v2", "receive v2"]


def test_a_piece_that_only_one_side_checked_is_a_mismatch() -> None:
    with pytest.raises(WeightSyncError, match="holds checksum nothing"):
        _syncer(Roles(received=(None, None))).sync(1)


def test_a_dead_sender_ends_the_sync_at_once_without_commit() -> None:
    dead = Failure("actor", 0, "send_weights", FailureKind.DIED, "its process ended")
    roles = Roles(send_failures=[dead])
    with pytest.raises(EngineError, match="actor rank 0 died in phase send_weights"):
        _syncer(roles).sync(1)
    assert roles.diary == ["pause", "send v1", "receive v1"]


def test_without_verification_the_report_says_so() -> None:
    report = _syncer(Roles(received=(None,), sent=None), verify=False).sync(1)
    assert report.is_verified is False


@pytest.mark.parametrize(("every", "probed"), [(0, [1]), (1, [1, 2, 3, 4, 5]), (3, [1, 4])])
def test_the_first_sync_is_probed_and_then_every_nth(every: int, probed: list[int]) -> None:
    roles = Roles(received=(7,) * 5)
    syncer = _syncer(roles, probe_every=every)
    reports = {version: syncer.sync(version) for version in range(1, 6)}
    assert [version for version, report in reports.items() if report.probe_abs_max is not None] == probed
    assert reports[1].metrics()["weight_sync/probe_abs_max"] == 0.0
    assert ("weight_sync/probe_abs_max" in reports[2].metrics()) is (every == 1)


def test_the_probe_reports_the_largest_difference_and_gives_every_data_parallel_rank_the_same_rows() -> None:
    roles = Roles(replica_logprobs=(-1.0, -1.125, -0.9375))
    assert _syncer(roles).sync(1).probe_abs_max == 0.125
    assert roles.probed_rows == 3 * roles.dp_size


@pytest.mark.parametrize("wrong", [-1.5, float("nan")])
def test_engines_that_differ_on_the_probe_fail_the_run_and_say_where_and_what_to_do(wrong: float) -> None:
    with pytest.raises(WeightSyncError) as caught:
        _syncer(Roles(replica_logprobs=(-1.0, wrong))).sync(1)
    message = str(caught.value)
    assert message.startswith("probe of version 1: log-prob of token 1 after the probe prompt differs by")
    assert (
        "expected at most 0.25 (weight_sync.probe_tolerance)" in message and "(replica 1 of those connected)" in message
    )
    assert "fresh vLLM" in message


def test_a_probe_takes_few_tokens_and_the_tolerance_of_the_coarsest_precision() -> None:
    both, single = (Precision.FLOAT32, Precision.BFLOAT16), (Precision.FLOAT32,) * 2
    assert make_probe(range(40), None, both, 64) == Probe(tuple(range(16)), 1.0)
    assert make_probe(range(40), None, single, 8) == Probe(tuple(range(7)), 0.01)
    assert make_probe((3,), 0.5, both, 8) == Probe((3,), 0.5)


def test_replicas_that_come_and_go_get_a_new_plan_and_a_new_session() -> None:
    roles = Roles(received=(7,) * 4)
    syncer = _syncer(roles)
    syncer.sync(1)
    roles.num_replicas = 2
    syncer.connect([*DESTINATIONS, _map("rollout", 1)])
    (first, _), (again, _), (second, sent), (_, received) = roles.connections
    assert first == again and first.session != second.session
    assert [len(sent), len(received)] == [1, 2]
    assert sum(part.wire_bytes for part in received) == sent[0].wire_bytes == 64
    with pytest.raises(WeightSyncError, match="rollout rank 1 holds checksum nothing"):
        syncer.sync(2)  # the fake reports for one replica only: both sides are now compared for two


def test_a_sync_without_a_connection_is_refused() -> None:
    config = WeightSyncConfig()
    connector = Connector(Roles(), Roles(), SOURCES, config, Platform.CPU, "session")
    with pytest.raises(EngineError, match="not connected; connect them first"):
        WeightSyncer(Roles(), Roles(), connector, config, PROBE).sync(1)
