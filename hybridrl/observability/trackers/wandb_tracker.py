"""Weights & Biases: offline, which writes into the run's folder for ``wandb sync`` later and needs no account, or online."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hybridrl.observability.records import Metric, Outcome
from hybridrl.observability.trackers.tracker import import_library


class WandbTracker:
    """See :class:`hybridrl.observability.trackers.tracker.Tracker`.

    Raises:
        ConfigError: The package wandb is not installed.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, object], *, is_online: bool) -> None:
        self._run = import_library("wandb").init(
            project=project,
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(config),
            mode="online" if is_online else "offline",
            save_code=False,
            settings={"silent": True, "console": "off"},
        )

    def append(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Take the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self, outcome: Outcome) -> None:
        """Finish the run; an offline one is whole on disk after that."""
        self._run.finish(exit_code=0 if outcome is Outcome.FINISHED else 1)
