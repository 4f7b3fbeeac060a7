"""A rank of either side is killed in each phase of a weight sync: the error names it, soon, and no stale replica may sample."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import ray
import torch

from hybridrl.config.choices import Platform, TransportName
from hybridrl.config.schema import WeightSyncConfig
from hybridrl.controller.connection import Connector
from hybridrl.controller.probe import Probe
from hybridrl.controller.weight_sync import WeightSyncer
from hybridrl.errors import EngineError
from hybridrl.roles.dispatch import broadcast, per_rank
from hybridrl.roles.failure import ReplaceableRankLostError
from hybridrl.roles.group import RoleGroup
from hybridrl.roles.placement import Slot
from hybridrl.roles.ports import free_port
from hybridrl.roles.resources import Cluster, ResourcePool
from tests.e2e.thin_roles import DOOMED_RANK, ThinRank, all_maps


class NoProbe:
    """Thin ranks compute nothing that could be compared."""

    def measure(self, *arguments: object) -> float:
        return 0.0


NO_PROBE: Any = NoProbe()
pytestmark = pytest.mark.timeout(120)
NUM_RANKS = 2
LIMIT_S = 20.0  # far below the sync's own bound: a death is seen, not waited out


class ThinRole:
    """A role of thin ranks with the calls that the protocol makes."""

    dp_size = num_replicas = NUM_RANKS

    def __init__(
        self, pool: ResourcePool, role: str, first_bundle: int, doomed_phase: str, *, is_replaceable: bool = False
    ) -> None:
        slots = [Slot(first_bundle + rank, 1, 0) for rank in range(NUM_RANKS)]
        self.actors = [pool.start_actor(ThinRank, slot, role, rank, doomed_phase) for rank, slot in enumerate(slots)]
        self.group = RoleGroup(role, self.actors, range(NUM_RANKS), is_replaceable=is_replaceable)

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", free_port("127.0.0.1")

    def connect_sync(self, rendezvous: Any, parts: Sequence[Any], *, timeout_s: float, verify: bool = True) -> Any:
        return self._call("connect_sync", per_rank([(rendezvous, part) for part in parts]), timeout_s)

    def pause(self, timeout_s: float) -> Any:
        return self._call("pause", broadcast(), timeout_s)

    def send_weights(self, version: int, timeout_s: float) -> Any:
        return self._call("send_weights", broadcast(version, timeout_s / 2), timeout_s)

    def receive_weights(self, version: int, *, verify: bool, timeout_s: float) -> Any:
        arguments = broadcast(version, timeout_s / 2)
        phase = "receive_weights"
        return self.group.call(phase, arguments, lambda parts: [*chain(*parts)], phase=phase, timeout_s=timeout_s)

    def commit(self, version: int, timeout_s: float) -> Any:
        return self._call("commit", broadcast(version), timeout_s)

    def resume(self, timeout_s: float) -> Any:
        return self._call("resume", broadcast(), timeout_s)

    def _call(self, phase: str, arguments: Any, timeout_s: float) -> Any:
        return self.group.call(phase, arguments, list, phase=phase, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def pool() -> Iterator[ResourcePool]:
    with Cluster(None, 2 * NUM_RANKS) as cluster:
        yield cluster.pool([{"CPU": 1}] * (2 * NUM_RANKS), 60.0)


@pytest.mark.parametrize(
    ("role", "phase"),
    [
        ("rollout", "pause"),
        ("actor", "send_weights"),
        ("rollout", "receive_weights"),
        ("rollout", "commit"),
        ("rollout", "resume"),
    ],
)
def test_a_rank_that_dies_is_named_with_its_phase_and_nobody_samples(
    pool: ResourcePool, monkeypatch: pytest.MonkeyPatch, role: str, phase: str
) -> None:
    actor = ThinRole(pool, "actor", 0, phase if role == "actor" else "")
    rollout = ThinRole(pool, "rollout", NUM_RANKS, phase if role == "rollout" else "")
    killed: list[bool] = []
    for each in (actor, rollout):  # a failure ends whole roles; look at the survivors first
        monkeypatch.setattr(each.group, "kill", lambda: killed.append(True))
    try:
        config = WeightSyncConfig(timeout_s=60.0)
        connector = Connector(actor, rollout, all_maps("actor"), config, Platform.CPU, f"thin-{phase}")
        syncer = WeightSyncer(actor, rollout, connector, config, Probe((1,), 1.0))
        syncer.connect(all_maps("rollout"))
        started = time.monotonic()
        with pytest.raises(EngineError, match=rf"^{role} rank {DOOMED_RANK} died in phase {phase}:"):
            syncer.sync(1)
        assert time.monotonic() - started < LIMIT_S
        assert killed, "the role of the dead rank was not ended"
        survivor = rollout.actors[0].may_sample
        if phase in ("commit", "receive_weights", "send_weights"):
            assert not _answer(survivor), "a replica may sample although the sync was not completed"
    finally:
        for handle in (*actor.actors, *rollout.actors):
            ray.kill(handle)


@pytest.mark.parametrize("transport", [TransportName.SHM, TransportName.GLOO])
@pytest.mark.parametrize("phase", ["connect_sync", "receive_weights"])
def test_training_ranks_outlive_a_replaceable_rank_that_dies_and_send_the_same_version_to_its_successor(
    pool: ResourcePool, phase: str, transport: TransportName
) -> None:
    actor = ThinRole(pool, "actor", 0, "")
    rollout = ThinRole(pool, "rollout", NUM_RANKS, phase, is_replaceable=True)
    config = WeightSyncConfig(timeout_s=10.0, transport=transport)

    def syncer() -> WeightSyncer:
        connector = Connector(actor, rollout, all_maps("actor"), config, Platform.CPU, uuid.uuid4().hex[:12])
        return WeightSyncer(actor, rollout, connector, config, NO_PROBE)

    try:
        ray.get([each.may_sample.remote() for each in (*actor.actors, *rollout.actors)], timeout=60)
        started = time.monotonic()
        broken = syncer()
        with pytest.raises(ReplaceableRankLostError, match=rf"^rollout rank {DOOMED_RANK} died in phase {phase}:"):
            broken.connect(all_maps("rollout"))
            broken.sync(1)
        assert time.monotonic() - started < LIMIT_S
        for handle in rollout.actors:
            ray.kill(handle)
        rollout = ThinRole(pool, "rollout", NUM_RANKS, "", is_replaceable=True)
        ray.get([each.may_sample.remote() for each in rollout.actors], timeout=60)
        again = syncer()
        again.connect(all_maps("rollout"))
        assert again.sync(1).is_verified
        sent = torch.cat(ray.get([handle.weights.remote() for handle in actor.actors]))
        assert all(torch.equal(sent, ray.get(handle.weights.remote())) for handle in rollout.actors)
    finally:
        for handle in (*actor.actors, *rollout.actors):
            ray.kill(handle)


def _answer(method: Any) -> bool:
    """Ask a rank that may be busy with a transfer whose peer is gone; one that is busy samples nothing."""
    ready, _ = ray.wait([method.remote()], timeout=2.0)
    return bool(ready) and bool(ray.get(ready[0]))
