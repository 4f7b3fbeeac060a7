"""Entering a cluster that is not there."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import ray
from ray._private import utils

from hybridrl.errors import EngineError
from hybridrl.roles.resources import Cluster


def test_a_missing_cluster_is_an_error_with_a_next_step() -> None:
    with pytest.raises(EngineError, match=r"no Ray cluster at ray_address 'not-an-address'.*leave ray_address out"):
        Cluster("not-an-address", 1).__enter__()
    assert not ray.is_initialized()


def test_a_sigterm_while_ray_starts_reaches_the_handler_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    received = []

    def start(*arguments: object, **settings: object) -> None:
        utils.set_sigterm_handler(lambda number, frame: sys.exit(number))  # as ray.init does, first of all
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ray, "init", start)
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with Cluster("address", 1):
            assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_private_cluster_that_does_not_start_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EngineError, match="Ray did not start on this machine"):
        Cluster(None, -9).__enter__()
    assert not list(tmp_path.iterdir())
