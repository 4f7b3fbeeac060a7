"""Trackers that cannot be started end the run with the key that turned them on, and none stays open."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.config.choices import WandbMode
from hybridrl.config.schema import ExperimentConfig, TrackingConfig
from hybridrl.controller.tracking import open_trackers
from hybridrl.errors import ConfigError
from hybridrl.observability.progress import PlainProgress
from hybridrl.observability.recorder import RunRecorder
from hybridrl.observability.records import Outcome
from hybridrl.observability.trackers.background import BackgroundTracker
from tests.unit.observability.trackers.clients import FakeMlflow, FakeWandb


def raising(error: Exception) -> Any:
    def fail(**settings: Any) -> None:
        raise error

    return fail


def run_with(tracking: TrackingConfig, folder: Path) -> None:
    with RunRecorder(folder, "calc", "name: calc\n", 1, progress=PlainProgress(1)) as recorder:
        for tracker in open_trackers(ExperimentConfig(tracking=tracking), recorder.run_dir):
            recorder.track(tracker)


def test_a_server_that_is_not_there_is_named_and_the_trackers_before_it_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, refused = FakeWandb(), raising(ConnectionError("connection refused"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=refused))
    tracking = TrackingConfig(wandb=WandbMode.OFFLINE, mlflow_uri="http://nowhere:5000")
    expected = r"tracking.mlflow_uri: the tracker cannot be started: ConnectionError: connection refused; correct it"
    with pytest.raises(ConfigError, match=expected):
        run_with(tracking, tmp_path)
    assert wandb.calls[-1] == ("finish", 1)


def test_a_login_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=raising(RuntimeError("no API key"))))
    with pytest.raises(ConfigError, match=r"tracking.wandb: the tracker cannot be started: RuntimeError: no API key"):
        run_with(TrackingConfig(wandb=WandbMode.ONLINE), tmp_path)


def test_clients_of_servers_run_behind_a_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    monkeypatch.setitem(sys.modules, "mlflow", FakeMlflow())
    tracking = TrackingConfig(wandb=WandbMode.ONLINE, mlflow_uri="http://somewhere:5000", prometheus_port=0)
    opened = list(open_trackers(ExperimentConfig(tracking=tracking), tmp_path))
    try:
        assert [(tracker.name, isinstance(tracker, BackgroundTracker)) for tracker in opened] == [
            ("wandb", True),
            ("mlflow", True),
            ("prometheus", False),
        ]
    finally:
        for tracker in opened:
            tracker.close(Outcome.FINISHED)
