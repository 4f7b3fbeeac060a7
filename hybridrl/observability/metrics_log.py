"""Metrics on disk: ``metrics.jsonl`` and TensorBoard event files.

Both are flushed at every step, so a killed process leaves all finished steps behind.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from hybridrl.observability.files import write_text_atomic
from hybridrl.observability.records import Metric


class MetricsLog:
    """Appends metrics of steps to the files of a run.

    Args:
        run_dir: Existing folder of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._lines = self._path.open("a", encoding="utf-8")
        self._events = EventFileWriter(str(run_dir / "tensorboard"))

    def append(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Write one object, as one line, and the same numbers as TensorBoard scalars."""
        self._lines.write(metrics_line(step, metrics) + "\n")
        self._lines.flush()
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._events.flush()

    def resume(self, step: int) -> list[tuple[int, dict[str, Metric]]]:
        """Drop what there is of `step` and later ones, which will come again; return what is left.

        A last line without an end, which a killed process leaves, goes as well.
        """
        lines = [
            line for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
        ]
        rows = {line: _row_of(line) for line in lines}
        kept = [line for line in lines if rows[line][0] < step]
        self._lines.close()
        write_text_atomic(self._path, "".join(kept))
        self._lines = self._path.open("a", encoding="utf-8")
        # TensorBoard takes this as the word to forget the steps from here on.
        self._events.add_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))
        return [rows[line] for line in kept]

    def close(self) -> None:
        """Close both files."""
        self._lines.close()
        self._events.close()


def _row_of(line: str) -> tuple[int, dict[str, Metric]]:
    """Return step and metrics of a line that :func:`metrics_line` made."""
    row = json.loads(line)
    non_finite = {name: float(text) for name, text in row.pop("non_finite", {}).items()}
    return row.pop("step"), row | non_finite


def metrics_line(step: int, metrics: Mapping[str, Metric]) -> str:
    """Return the JSON object of one step.

    JSON has no NaN and no infinity: such a value becomes null, and ``non_finite`` says what it was.
    Example: ``{"step": 3, "actor/loss": null, "non_finite": {"actor/loss": "nan"}}``.
    """
    row: dict[str, object] = {"step": step}
    non_finite: dict[str, str] = {}
    for name, raw in metrics.items():
        value = raw.item() if isinstance(raw, np.generic) else raw
        if isinstance(value, float) and not math.isfinite(value):
            non_finite[name] = str(value)
            value = None
        row[name] = value
    if non_finite:
        row["non_finite"] = non_finite
    return json.dumps(row, allow_nan=False)
