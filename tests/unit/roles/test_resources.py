"""Entering a cluster that is not there."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private import utils
from ray.exceptions import GetTimeoutError

from hybridrl.errors import EngineError, RankLostError
from hybridrl.roles import resources
from hybridrl.roles.resources import Cluster


def test_a_missing_cluster_is_an_error_with_a_next_step() -> None:
    with pytest.raises(EngineError, match=r"no Ray cluster at ray_address 'not-an-address'.*leave ray_address out"):
        Cluster("not-an-address", 1).__enter__()
    assert not ray.is_initialized()


def test_a_sigterm_reaches_the_handler_of_the_run_while_ray_starts_and_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received = []

    def start(*arguments: object, **settings: object) -> None:
        utils.set_sigterm_handler(lambda number, frame: sys.exit(number))  # as ray.init does, first of all
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as its core does, last of all

    monkeypatch.setattr(ray, "init", start)
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with Cluster("address", 1):
            os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_cluster_that_does_not_take_back_what_was_reserved_does_not_hide_what_ended_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def remove(group: object) -> None:
        raise GetTimeoutError("there was timeout in removing the placement group")

    monkeypatch.setattr(resources, "placement_group", lambda bundles, strategy: SimpleNamespace(ready=lambda: None))
    monkeypatch.setattr(resources, "placement_group_table", lambda group: {"bundles_to_node_id": {}})
    monkeypatch.setattr(resources, "remove_placement_group", remove)
    monkeypatch.setattr(ray, "get", lambda ref, timeout: None)
    monkeypatch.setattr(ray, "init", lambda *arguments, **settings: None)
    with pytest.raises(EngineError, match="died"), Cluster("address", 1) as cluster:
        cluster.pool([], timeout_s=1.0)
        raise EngineError("died")


def test_a_private_cluster_that_does_not_start_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EngineError, match="Ray did not start on this machine"):
        Cluster(None, -9).__enter__()
    assert not list(tmp_path.iterdir())


def test_logs_that_cannot_be_kept_are_said_and_neither_hide_what_ended_the_run_nor_leave_ray_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "run").touch()  # no folder can be made in it
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "ray"))
    monkeypatch.setattr(ray, "init", lambda *arguments, **settings: None)
    message = rf"^rank 1 died\nthe logs of worker processes could not be copied into {tmp_path}/run/logs: .*Not a dir"
    with pytest.raises(RankLostError, match=message), Cluster(None, 1, tmp_path / "run" / "logs"):
        (folder,) = (tmp_path / "ray").iterdir()
        log = folder / "session_2026" / "logs" / "worker-1.out"
        log.parent.mkdir(parents=True)
        log.write_text("last words")
        raise RankLostError("rank 1 died")
    assert not list((tmp_path / "ray").iterdir())
