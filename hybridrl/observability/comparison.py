"""``hybridrl report``: runs side by side in one self-contained page (``comparison_page.html``).

Curves by group of metrics, settings that differ, final figures and the time of each phase. The page draws and smooths; this module
gathers, and thins long runs to a fixed number of points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from hybridrl.observability.page import write_page
from hybridrl.observability.run_folder import RunFolder, Scalar

_MAX_POINTS = 1000
_HOURS = "hours of training"


def write_comparison(path: Path, runs: Sequence[RunFolder]) -> None:
    """Write the page.

    Raises:
        DataError: The metrics of a run cannot be read.
    """
    names = _distinct_names(runs)
    data = {
        "runs": [_run_data(run, name) for run, name in zip(runs, names, strict=True)],
        "differences": config_differences([run.config() for run in runs]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(path, "comparison_page.html", data)


def config_differences(configs: Sequence[dict[str, Scalar]]) -> dict[str, list[Scalar]]:
    """Return the settings that are not the same in all configurations, with the value in each; None where one lacks the key.

    The name of a run and its folder always differ and say nothing, so they are left out.
    """
    keys = dict.fromkeys(key for config in configs for key in config if key not in ("name", "runs_dir"))
    values = {key: [config.get(key) for config in configs] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _run_data(run: RunFolder, name: str) -> dict[str, object]:
    rows = run.metrics()
    hours: list[float | None] = list(
        accumulate((seconds or 0.0) / 3600 for seconds in rows.series.get("time_s/step", [0.0] * len(rows.steps)))
    )
    shown = replace(rows, series=rows.series | {_HOURS: hours}).thinned(_MAX_POINTS)
    return {
        "name": name,
        "path": str(run.path),
        "num_steps": len(rows.steps),
        "steps": shown.steps,
        "hours": shown.series.pop(_HOURS),
        "series": shown.series,
        "phases": {
            metric.removeprefix("time_s/"): _mean(values)
            for metric, values in rows.series.items()
            if metric.startswith("time_s/")
        },
    }


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean per step, of which those without a value count 0."""
    return sum(value or 0.0 for value in values) / len(values)


def _distinct_names(runs: Sequence[RunFolder]) -> list[str]:
    """Return the names of the folders; their paths where names occur twice."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.path) for run, name in zip(runs, names, strict=True)]
