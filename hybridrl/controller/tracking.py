"""Trackers of a run, as its configuration turns them on."""

from __future__ import annotations

from pathlib import Path

import yaml

from hybridrl.config.dump import resolved_yaml
from hybridrl.config.schema import ExperimentConfig, WandbMode
from hybridrl.observability.run_folder import flat_config
from hybridrl.observability.trackers.mlflow_tracker import MlflowTracker
from hybridrl.observability.trackers.prometheus_tracker import PrometheusTracker
from hybridrl.observability.trackers.tracker import Tracker
from hybridrl.observability.trackers.wandb_tracker import WandbTracker


def open_trackers(config: ExperimentConfig, run_dir: Path) -> list[Tracker]:
    """Start the trackers that are on.

    Raises:
        ConfigError: A package is not installed, or a port is taken.
    """
    tracking, resolved = config.tracking, yaml.safe_load(resolved_yaml(config))
    trackers: list[Tracker] = []
    if tracking.wandb is not WandbMode.OFF:
        is_online = tracking.wandb is WandbMode.ONLINE
        trackers.append(WandbTracker(run_dir, tracking.wandb_project, resolved, is_online=is_online))
    if tracking.mlflow_uri is not None:
        trackers.append(MlflowTracker(tracking.mlflow_uri, run_dir.name, flat_config(resolved)))
    if tracking.prometheus_port is not None:
        trackers.append(PrometheusTracker(tracking.prometheus_host, tracking.prometheus_port, run_dir.name))
    return trackers
