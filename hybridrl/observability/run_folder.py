"""A run's folder, read back: what ``recorder.py`` and ``metrics_log.py`` write."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from hybridrl.errors import DataError

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class MetricRows:
    """The metrics of a run.

    Attributes:
        steps: Increasing.
        series: By name, one value per step; None where a step has none or it is not finite.
    """

    steps: tuple[int, ...]
    series: dict[str, list[float | None]]

    def thinned(self, max_points: int) -> MetricRows:
        """Return at most about `max_points` steps, the last one and every step with an evaluation among them."""
        stride = -(-len(self.steps) // max_points) or 1
        evaluated = self.series.get("eval/reward_mean", [None] * len(self.steps))
        last = len(self.steps) - 1
        kept = [i for i in range(len(self.steps)) if (last - i) % stride == 0 or evaluated[i] is not None]
        return MetricRows(
            tuple(self.steps[i] for i in kept),
            {name: [values[i] for i in kept] for name, values in self.series.items()},
        )


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that a run has written."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the run, which is that of its folder."""
        return self.path.absolute().name

    @property
    def config_text(self) -> str:
        """The configuration that ran, as YAML."""
        return (self.path / "config.resolved.yaml").read_text(encoding="utf-8")

    def config(self) -> dict[str, Scalar]:
        """Return the configuration by dotted key.

        Raises:
            DataError: The file holds no configuration.
        """
        try:
            sections = yaml.safe_load(self.config_text)
        except (ValueError, yaml.YAMLError):
            sections = None
        if not isinstance(sections, dict):
            path = self.path / "config.resolved.yaml"
            raise DataError(f"{path}: is no YAML with sections, expected what a run wrote; was it damaged or changed?")
        return flat_config(sections)

    def metrics(self) -> MetricRows:
        """Return the metrics of every finished step; a last line that is not whole, of a running or a killed run, is left out.

        Raises:
            DataError: Another line is not an object with a step.
        """
        path = self.path / "metrics.jsonl"
        rows: dict[int, dict[str, object]] = {}
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
            try:
                row = json.loads(line)
                rows.setdefault(int(row.pop("step")), {}).update(row)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
                raise DataError(f"{path}:{number}: got {line[:80]!r}, expected a JSON object with a step") from e
        names = sorted({name for row in rows.values() for name in row if name != "non_finite"})
        series = {name: [_number(row.get(name)) for row in rows.values()] for name in names}
        return MetricRows(tuple(rows), series)

    def rollout_files(self) -> dict[int, Path]:
        """Return the files of training samples by step."""
        return _numbered(self.path / "rollouts")

    def evaluation_files(self) -> dict[int, Path]:
        """Return the files of held-out samples by policy version."""
        return _numbered(self.path / "evaluations")


def open_run(path: Path) -> RunFolder:
    """Return the folder of a run.

    Raises:
        DataError: It is not one.
    """
    missing = [name for name in ("config.resolved.yaml", "metrics.jsonl") if not (path / name).is_file()]
    if missing:
        raise DataError(
            f"{path}: has no {' and no '.join(missing)}, expected the folder of a run, for example runs/calc"
        )
    return RunFolder(path)


def _numbered(folder: Path) -> dict[int, Path]:
    """Return ``step_000012.parquet`` and the like by their numbers, in order."""
    found = {path.stem.rpartition("_")[2]: path for path in folder.glob("*_*.parquet")}
    return {
        int(number): found[number]
        for number in sorted(found, key=lambda n: int(n) if n.isdigit() else -1)
        if number.isdigit()
    }


def flat_config(value: object, key: str = "") -> dict[str, Scalar]:
    """Return the values of nested sections by dotted key, below `key`."""
    if not isinstance(value, dict):
        return {key: value if isinstance(value, str | int | float | bool) else None}
    return {
        name: scalar
        for member, inner in value.items()
        for name, scalar in flat_config(inner, f"{key}.{member}" if key else str(member)).items()
    }


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
