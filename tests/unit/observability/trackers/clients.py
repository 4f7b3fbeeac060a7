"""The libraries of W&B and MLflow as fakes that keep what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


class FakeWandb:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init(self, **settings: Any) -> FakeWandb:
        self.calls.append(("init", settings))
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, metrics)))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


class FakeMlflow:
    """The module and its client in one."""

    entities = SimpleNamespace(
        Metric=lambda key, value, timestamp, step: (key, value, step), Param=lambda key, value: (key, value)
    )

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def MlflowClient(self, tracking_uri: str) -> FakeMlflow:  # noqa: N802  # the library's name
        self.calls.append(("client", tracking_uri))
        return self

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return f"id of {name}"

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        self.calls.append(("run", (experiment, run_name)))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_batch(self, run_id: str, metrics: Sequence[object] = (), params: Sequence[object] = ()) -> None:
        self.calls.append(("batch", (run_id, list(metrics), list(params))))

    def set_terminated(self, run_id: str, status: str) -> None:
        self.calls.append(("end", (run_id, status)))
