"""Entering a cluster that is not there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import ray

from hybridrl.errors import EngineError
from hybridrl.roles.resources import Cluster


def test_a_missing_cluster_is_an_error_with_a_next_step() -> None:
    with pytest.raises(EngineError, match=r"no Ray cluster at ray_address 'not-an-address'.*leave ray_address out"):
        Cluster("not-an-address", 1).__enter__()
    assert not ray.is_initialized()


def test_a_private_cluster_that_does_not_start_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EngineError, match="Ray did not start on this machine"):
        Cluster(None, -9).__enter__()
    assert not list(tmp_path.iterdir())
