"""The sync protocol on fakes: order, retry, failure, and what is never done after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from hybridrl.config.schema import WeightSyncConfig
from hybridrl.controller.weight_sync import WeightSyncer
from hybridrl.errors import EngineError, WeightSyncError
from hybridrl.layout.box import Box, DType
from hybridrl.layout.shard import CanonicalTensor, LocalTensor, Place, Shard, ShardMap
from hybridrl.reshard.executor import PieceKey, TransferReport
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.planner import build_plan, lower_bound_bytes
from hybridrl.roles.failure import Failure, FailureKind
from tests.unit.controller.fakes import FakeFuture

NAME = "model.norm.weight"


def _map(role: str, rank: int) -> ShardMap:
    place = Place(role, rank, "host", f"{role}:{rank}")
    shard = Shard(NAME, Box((0,), (8,)), "w", 0, (1,))
    tensors = {"w": LocalTensor("w", (8,), DType.FLOAT32)}
    return ShardMap(place, tensors, (shard,), {NAME: CanonicalTensor(NAME, (8,))})


SOURCES, DESTINATIONS = [_map("actor", 0)], [_map("rollout", 0)]
KEY = PieceKey(NAME, 0, 0)


def _report(checksum: int | None) -> TransferReport:
    return TransferReport(
        {} if checksum is None else {KEY: checksum}, 32, {"copy": 0.0, "checksum": 0.002, "total": 0.01}
    )


@dataclass
class Roles:
    """Both sides; `received` are the checksums that arrive in successive attempts (7 is what was sent)."""

    received: Sequence[int | None] = (7, 7)
    sent: int | None = 7
    send_failures: Sequence[Failure] = ()
    diary: list[str] = field(default_factory=list)
    attempts: int = 0

    def _note(self, entry: str) -> FakeFuture[None]:
        self.diary.append(entry)
        return FakeFuture(lambda: None)

    def pause(self, timeout_s: float) -> FakeFuture[None]:
        return self._note("pause")

    def send_weights(self, version: int, timeout_s: float) -> FakeFuture[list[TransferReport]]:
        self._note(f"send v{version}")
        return FakeFuture(lambda: [_report(self.sent)], self.send_failures)

    def receive_weights(self, version: int, *, verify: bool, timeout_s: float) -> FakeFuture[list[TransferReport]]:
        self._note(f"receive v{version}")
        self.attempts += 1
        return FakeFuture(lambda: [_report(self.received[self.attempts - 1])])

    def commit(self, version: int, timeout_s: float) -> FakeFuture[None]:
        return self._note(f"commit v{version}")

    def resume(self, timeout_s: float) -> FakeFuture[None]:
        return self._note("resume")


def _plan() -> Plan:
    return build_plan(SOURCES, DESTINATIONS)


def _syncer(roles: Roles, **settings: object) -> WeightSyncer:
    return WeightSyncer(roles, roles, _plan(), lower_bound_bytes(SOURCES, DESTINATIONS), WeightSyncConfig(**settings))


def test_a_sync_pauses_transfers_commits_and_resumes_in_this_order() -> None:
    roles = Roles()
    report = _syncer(roles).sync(4)
    assert roles.diary == ["pause", "send v4", "receive v4", "commit v4", "resume"]
    assert (report.is_verified, report.num_retries, report.wire_bytes, report.lower_bound_bytes) == (True, 0, 32, 32)
    assert report.checksum_seconds == 0.002
    assert report.metrics()["weight_sync/wire_bytes"] == 32


def test_a_mismatch_is_retried_once_and_then_committed() -> None:
    roles = Roles(received=(8, 7))
    report = _syncer(roles).sync(1)
    assert roles.diary == ["pause", "send v1", "receive v1", "send v1", "receive v1", "commit v1", "resume"]
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
    dead = Failure("actor", 0, "weight_sync", FailureKind.DIED, "its process ended")
    roles = Roles(send_failures=[dead])
    with pytest.raises(EngineError, match="actor rank 0 died in phase weight_sync"):
        _syncer(roles).sync(1)
    assert roles.diary == ["pause", "send v1", "receive v1"]


def test_without_verification_the_report_says_so() -> None:
    report = _syncer(Roles(received=(None,), sent=None), verify=False).sync(1)
    assert report.is_verified is False
