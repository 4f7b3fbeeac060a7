"""MLflow: a folder or a database on this machine, or a server."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping

from hybridrl.observability.records import Metric, Outcome
from hybridrl.observability.trackers.tracker import import_library

_EXPERIMENT = "hybridrl"
_STATUS = {Outcome.FINISHED: "FINISHED", Outcome.FAILED: "FAILED", Outcome.INTERRUPTED: "KILLED"}


class MlflowTracker:
    """See :class:`hybridrl.observability.trackers.tracker.Tracker`.

    Args:
        uri: Such as ``file:///home/me/mlruns``, ``sqlite:////home/me/mlflow.db`` or ``http://host:5000``.

    Raises:
        ConfigError: The package mlflow is not installed.
    """

    name = "mlflow"

    def __init__(self, uri: str, run_name: str, config: Mapping[str, object]) -> None:
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer ones take folders on request only
        self._mlflow = import_library("mlflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(_EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(_EXPERIMENT)
        self._run_id = self._client.create_run(experiment, run_name=run_name).info.run_id
        params = [self._mlflow.entities.Param(key, str(value)) for key, value in config.items()]
        self._client.log_batch(self._run_id, params=params)

    def append(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Take the metrics of one step; those that are not finite are left out."""
        now_ms, values = int(time.time() * 1000), {name: float(value) for name, value in metrics.items()}
        batch = [
            self._mlflow.entities.Metric(name, value, now_ms, step)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        self._client.log_batch(self._run_id, metrics=batch)

    def close(self, outcome: Outcome) -> None:
        """Finish the run."""
        self._client.set_terminated(self._run_id, _STATUS[outcome])
