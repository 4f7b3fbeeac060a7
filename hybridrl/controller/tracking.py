"""Trackers of a run, as its configuration turns them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import yaml

from hybridrl.config.choices import WandbMode
from hybridrl.config.dump import resolved_yaml
from hybridrl.config.schema import ExperimentConfig
from hybridrl.errors import ConfigError
from hybridrl.observability.run_folder import flat_config
from hybridrl.observability.trackers.background import BackgroundTracker
from hybridrl.observability.trackers.mlflow_tracker import MlflowTracker
from hybridrl.observability.trackers.prometheus_tracker import PrometheusTracker
from hybridrl.observability.trackers.tracker import Tracker
from hybridrl.observability.trackers.wandb_tracker import WandbTracker


def open_trackers(config: ExperimentConfig, run_dir: Path) -> Iterator[Tracker]:
    """Start the trackers that are on, one at a time: whoever takes one closes it, also when the next cannot start.

    Raises:
        ConfigError: A tracker cannot be started; names its key.
    """
    tracking, resolved = config.tracking, yaml.safe_load(resolved_yaml(config))
    start: Callable[[], Tracker]
    if tracking.wandb is not WandbMode.OFF:
        is_online = tracking.wandb is WandbMode.ONLINE
        start = partial(WandbTracker, run_dir, tracking.wandb_project, resolved, is_online=is_online)
        yield BackgroundTracker(_started("tracking.wandb", start))
    if tracking.mlflow_uri is not None:
        start = partial(MlflowTracker, tracking.mlflow_uri, run_dir.name, flat_config(resolved))
        yield BackgroundTracker(_started("tracking.mlflow_uri", start))
    if tracking.prometheus_port is not None:
        yield PrometheusTracker(tracking.prometheus_host, tracking.prometheus_port, run_dir.name)


def _started(key: str, start: Callable[[], Tracker]) -> Tracker:
    try:
        return start()
    except ConfigError:
        raise
    except Exception as e:  # another program's client, at a process boundary
        cause = f"{type(e).__name__}: {e}"
        raise ConfigError(f"{key}: the tracker cannot be started: {cause}; correct it, or turn it off") from e
