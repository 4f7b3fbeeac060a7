"""What a tracker is: a program elsewhere that draws the metrics of runs, beside the run's own files."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from hybridrl.errors import ConfigError
from hybridrl.observability.records import Metric, Outcome


class Tracker(Protocol):
    """Gets the metrics of every step. What it raises ends it, and not the run."""

    name: str

    def append(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Take the metrics of one step."""
        ...

    def close(self, outcome: Outcome) -> None:
        """Finish; no step follows."""
        ...


def import_library(name: str) -> Any:
    """Import an optional library.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        raise ConfigError(f"tracking: {name} cannot be imported ({e}); pip install {name}, or turn it off") from e
