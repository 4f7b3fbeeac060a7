"""Role groups on real Ray actors that do next to nothing: dispatch, time-outs, root causes, scarce resources."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from hybridrl.errors import EngineError, EngineLostError
from hybridrl.observability.heartbeat import HEARTBEAT, Identity
from hybridrl.roles import node_watch
from hybridrl.roles.dispatch import broadcast, per_rank, scatter_dp
from hybridrl.roles.failure import ReplaceableRankLostError
from hybridrl.roles.future import wait_for
from hybridrl.roles.group import RoleGroup
from hybridrl.roles.node_watch import NodeWatches
from hybridrl.roles.placement import Slot
from hybridrl.roles.resources import Cluster, ResourcePool

pytestmark = pytest.mark.timeout(120)
NUM_RANKS = 3
LAST_WORDS = "not even a traceback"


class Echo:
    """Answers, dawdles, raises or dies."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def echo(self, value: object) -> tuple[int, object]:
        return self._rank, value

    def dawdle(self, rank: int) -> None:
        if self._rank == rank:
            time.sleep(30)

    def fail(self, culprit: int) -> None:
        """The culprit raises late; its peers lose their connection to it first."""
        if self._rank != culprit:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        time.sleep(0.5)
        raise KeyError("no such expert")

    def lose(self, rank: int) -> None:
        """The engine that the rank drives ends, and the rank does not."""
        if self._rank == rank:
            raise EngineLostError("the engine process is dead")

    def die(self, rank: int) -> None:
        if self._rank == rank:
            print(LAST_WORDS, file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")


class Shown(Echo):
    """Shows a heartbeat."""

    def __init__(self, rank: int, session: str) -> None:
        super().__init__(rank)
        HEARTBEAT.show(Identity(session, "actor", rank))


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResourcePool]:
    """A cluster that, in the end, fails and leaves the words of its ranks behind."""
    logs = tmp_path_factory.mktemp("run") / "logs"
    message = rf"^the run failed\n\d+ logs of worker processes are in {logs}$"
    with pytest.raises(EngineError, match=message), Cluster(None, NUM_RANKS, logs) as cluster:
        yield cluster.pool([{"CPU": 1}] * NUM_RANKS, 30.0)
        raise EngineError("the run failed")
    assert any(LAST_WORDS in log.read_text() for log in logs.iterdir())


@pytest.fixture
def group(pool: ResourcePool) -> Iterator[RoleGroup]:
    actors = [pool.start_actor(Echo, Slot(rank, 1, 0), rank) for rank in range(NUM_RANKS)]
    group = RoleGroup("actor", actors, [0, 1, 0])
    yield group
    group.kill()


def test_each_dispatch_reaches_the_ranks_that_it_names(group: RoleGroup) -> None:
    def call(dispatch: object) -> list[object]:
        return [value for _, value in wait_for(group.call("echo", dispatch, list, phase="test", timeout_s=30))]

    assert call(broadcast("all")) == ["all"] * 3
    assert call(per_rank([("a",), ("b",), ("c",)])) == ["a", "b", "c"]
    assert call(scatter_dp([("even",), ("odd",)])) == ["even", "odd", "even"]


def test_a_time_out_names_role_ranks_phase_and_seconds(group: RoleGroup) -> None:
    wait_for(group.call("echo", broadcast(0), list, phase="warm-up", timeout_s=30))
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"^actor rank 2: no answer in phase train; gave up after 1 s$"):
        wait_for(group.call("dawdle", broadcast(2), list, phase="train", timeout_s=1))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("method", "text"),
    [("die", "its process ended"), ("lose", "the engine process is dead")],
    ids=["process", "engine"],
)
def test_a_replaceable_rank_that_dies_or_whose_engine_does_ends_no_other(
    pool: ResourcePool, method: str, text: str
) -> None:
    actors = [pool.start_actor(Echo, Slot(rank, 1, 0), rank) for rank in range(2)]
    group = RoleGroup("rollout", actors, [0, 1], [4, 7], is_replaceable=True)
    with pytest.raises(ReplaceableRankLostError, match=rf"^rollout rank 7 died in phase test:\n{text}") as caught:
        wait_for(group.call(method, broadcast(1), list, phase="test", timeout_s=30))
    assert [failure.rank for failure in caught.value.failures] == [7]
    survivor = RoleGroup("rollout", actors[:1], [0])
    assert wait_for(survivor.call("echo", broadcast("here"), list, phase="test", timeout_s=30)) == [(0, "here")]
    group.kill()


def test_the_ranks_own_exception_is_shown_and_not_its_peers_lost_connections(group: RoleGroup) -> None:
    with pytest.raises(EngineError) as caught:
        wait_for(group.call("fail", broadcast(1), list, phase="train", timeout_s=30))
    message = str(caught.value)
    assert message.startswith("actor rank 1 failed in phase train:")
    assert "KeyError: 'no such expert'" in message and "in fail" in message
    assert "after it failed: actor rank 0, actor rank 2" in message


def test_a_death_is_the_cause_and_ends_the_whole_group(group: RoleGroup) -> None:
    with pytest.raises(EngineError, match=r"^actor rank 0 died in phase train:"):
        wait_for(group.call("die", broadcast(0), list, phase="train", timeout_s=30))
    with pytest.raises(EngineError, match="died in phase after"):
        wait_for(group.call("echo", broadcast(0), list, phase="after", timeout_s=30))


def test_another_node_is_looked_at_from_a_process_on_it(monkeypatch: pytest.MonkeyPatch, pool: ResourcePool) -> None:
    monkeypatch.setattr(node_watch, "this_node", lambda: "another node than the only one")
    watches = NodeWatches("test-of-nodes")
    shown = pool.start_actor(Shown, Slot(0, 1, 0), 7, watches.session)
    assert ray.get(shown.echo.remote(1)) == (7, 1)
    with watches.reaching(pool.nodes):
        deadline = time.monotonic() + 30
        while not (tables := watches.progress())[1]:
            assert time.monotonic() < deadline
        here, there = tables
        assert here == there and list(here.values()) == [0]
        for report in watches.collect(3.0):
            assert str(report.identity) == "actor rank 7"
            assert report.stacks and "main_loop" in [frame.function for frame in report.stacks[-1]]
        watches.kill()
        with pytest.raises(RayActorError):
            ray.get(shown.echo.remote(2), timeout=30)


def test_resources_that_the_cluster_lacks_are_refused_in_time_with_what_it_has(pool: ResourcePool) -> None:
    with pytest.raises(EngineError) as caught:
        ResourcePool([{"CPU": 64}], 1.0)
    message = str(caught.value)
    assert "did not grant 64 CPU, 0 GPU within 1 s; it has 5 CPU" in message and "rollout.num_replicas" in message


def test_a_stop_signal_still_reaches_our_own_handler_on_a_cluster(pool: ResourcePool) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_private_cluster_listens_on_loopback_only(group: RoleGroup) -> None:
    wait_for(group.call("echo", broadcast(0), list, phase="warm-up", timeout_s=30))
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {
        connection.laddr.ip
        for process in family
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"} and listening


class Environment:
    def value(self, name: str) -> str | None:
        return os.environ.get(name)


def test_a_process_can_be_started_by_a_command_of_its_own(pool: ResourcePool, tmp_path: Path) -> None:
    script = tmp_path / "profiled python"
    script.write_text('#!/bin/sh\nexport PROFILED=yes\nexec "$@"\n')
    script.chmod(0o755)
    for python, expected in ((shlex.join([str(script), sys.executable]), "yes"), (None, None)):
        group = RoleGroup("actor", [pool.start_actor(Environment, Slot(0, 1, 0), python=python)], [0])
        assert wait_for(group.call("value", broadcast("PROFILED"), list, phase="test", timeout_s=60)) == [expected]
        group.kill()
