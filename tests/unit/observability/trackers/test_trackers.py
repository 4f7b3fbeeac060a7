"""Trackers against what they talk to: Prometheus over HTTP, the clients of W&B and MLflow as fakes."""

from __future__ import annotations

import math
import sys
import urllib.request
from pathlib import Path

import pytest

from hybridrl.errors import ConfigError
from hybridrl.observability.progress import PlainProgress
from hybridrl.observability.recorder import RunRecorder
from hybridrl.observability.records import Outcome
from hybridrl.observability.trackers.mlflow_tracker import MlflowTracker
from hybridrl.observability.trackers.prometheus_tracker import PrometheusTracker
from hybridrl.observability.trackers.wandb_tracker import WandbTracker
from tests.unit.observability.trackers.clients import FakeMlflow, FakeWandb

METRICS = {"reward/mean": 0.5, "weight_sync/verified": True, "actor/loss": math.nan}


def test_wandb_gets_the_run_its_configuration_and_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = WandbTracker(tmp_path / "calc", "sums", {"seed": 1}, is_online=False)
    tracker.append(3, {"reward/mean": 0.5})
    tracker.close(Outcome.FAILED)
    (_, settings), *rest = fake.calls
    assert (settings["project"], settings["name"], settings["mode"], settings["config"]) == (
        "sums",
        "calc",
        "offline",
        {"seed": 1},
    )
    assert settings["dir"] == str(tmp_path / "calc")
    assert rest == [("log", (3, {"reward/mean": 0.5})), ("finish", 1)]


def test_mlflow_gets_the_run_its_configuration_and_every_finite_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    tracker = MlflowTracker("sqlite:///runs.db", "calc", {"seed": 1, "name": "calc"})
    tracker.append(3, METRICS)
    tracker.close(Outcome.INTERRUPTED)
    assert fake.calls == [
        ("client", "sqlite:///runs.db"),
        ("run", ("id of hybridrl", "calc")),
        ("batch", ("r1", [], [("seed", "1"), ("name", "calc")])),
        ("batch", ("r1", [("reward/mean", 0.5, 3), ("weight_sync/verified", 1.0, 3)], [])),
        ("end", ("r1", "KILLED")),
    ]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=rf"tracking: {name} cannot be imported .*; pip install {name}, or turn it off"
    ):
        WandbTracker(tmp_path, "p", {}, is_online=False) if name == "wandb" else MlflowTracker("file:x", "calc", {})


def scrape(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]


def test_prometheus_reads_the_newest_value_of_every_metric_on_loopback() -> None:
    tracker = PrometheusTracker("127.0.0.1", 0, "calc")
    try:
        tracker.append(0, {"reward/mean": 0.25})
        tracker.append(1, METRICS)
        assert sorted(scrape(tracker.port)) == [
            'hybridrl_actor_loss{run="calc"} NaN',
            'hybridrl_reward_mean{run="calc"} 0.5',
            'hybridrl_step{run="calc"} 1.0',
            'hybridrl_weight_sync_verified{run="calc"} 1.0',
        ]
        with pytest.raises(
            ConfigError, match=rf"tracking.prometheus_port: 127.0.0.1:{tracker.port}: .*choose another port"
        ):
            PrometheusTracker("127.0.0.1", tracker.port, "other")
    finally:
        tracker.close(Outcome.FINISHED)
    with pytest.raises(OSError):
        scrape(tracker.port)


class FailingTracker:
    name = "remote"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def append(self, step: int, metrics: object) -> None:
        self.steps.append(step)
        if step == 1:
            raise ConnectionError("the server is gone")

    def close(self, outcome: Outcome) -> None:
        raise AssertionError("it was given up before")


def test_a_tracker_that_fails_is_given_up_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = FailingTracker()
    with RunRecorder(tmp_path, "calc", "name: calc\n", 3, progress=PlainProgress(3)) as recorder:
        recorder.track(tracker)
        for step in range(3):
            recorder.record_step(step, {"reward/mean": 0.5}, [])
    assert tracker.steps == [0, 1]
    assert "remote: ConnectionError: the server is gone; the run goes on without it" in capsys.readouterr().out
    assert len((tmp_path / "calc" / "metrics.jsonl").read_text().splitlines()) == 3
