"""``timeline.json``: when what ran, as a Chrome trace for https://ui.perfetto.dev or chrome://tracing.

A process of the trace is the controller or a role; its rows are the controller's phases, or the role's ranks. What overlaps on a row
gets further lanes of it. A span of a rank reaches from the call to the moment when the controller noticed the answer, which is up to
0.1 s late, and holds what the rank waited for before.

The file is an array, one event per line, flushed with every step. Viewers read it without its end, so that the trace of a killed run
opens as well.

Source: "Trace Event Format", complete events and metadata events.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

_MAX_BYTES = 256 * 2**20


class Timeline:
    """Writes spans to a file that does not exist yet; past `max_bytes`, further spans are dropped and a last one says so."""

    def __init__(self, path: Path, max_bytes: int = _MAX_BYTES) -> None:
        self._file: IO[str] = path.open("x", encoding="utf-8")
        self._file.write("[\n")
        self._room = max_bytes
        self._processes: dict[str, int] = {}
        self._lanes: dict[tuple[str, str], list[float]] = {}
        self._rows: dict[tuple[str, str, int], int] = {}
        self._separator = ""

    def add(self, process: str, row: str, name: str, start_s: float, end_s: float) -> None:
        """Add one span.

        Args:
            process: Such as ``controller`` or ``actor``.
            row: Such as ``rank 3``.
            name: What ran.
            start_s: By time.perf_counter(); spans of a row come in the order of their ends.
        """
        if self._room <= 0:
            return
        pid, tid = self._place(process, row, self._lane(process, row, start_s, end_s))
        span = {"ts": round(start_s * 1e6), "dur": round((end_s - start_s) * 1e6)}
        self._write({"ph": "X", "name": name, "pid": pid, "tid": tid, **span})
        if self._room <= 0:
            self._write({"ph": "X", "name": "the timeline is full", "pid": pid, "tid": tid, **span})

    def flush(self) -> None:
        """Bring what was added to disk."""
        self._file.flush()

    def close(self) -> None:
        """End the array."""
        self._file.write("\n]\n")
        self._file.close()

    def _lane(self, process: str, row: str, start_s: float, end_s: float) -> int:
        """Return the first lane that is free at `start_s`, and take it until `end_s`."""
        ends = self._lanes.setdefault((process, row), [])
        lane = next((lane for lane, end in enumerate(ends) if end <= start_s), len(ends))
        ends[lane : lane + 1] = [end_s]
        return lane

    def _place(self, process: str, row: str, lane: int) -> tuple[int, int]:
        """Return the numbers of a process and a lane, and name them when they are new."""
        if process not in self._processes:
            self._processes[process] = len(self._processes)
            self._name("process_name", process, self._processes[process], 0)
        pid = self._processes[process]
        if (process, row, lane) not in self._rows:
            self._rows[process, row, lane] = len(self._rows)
            self._name(
                "thread_name", row if lane == 0 else f"{row}, lane {lane + 1}", pid, self._rows[process, row, lane]
            )
        return pid, self._rows[process, row, lane]

    def _name(self, kind: str, name: str, pid: int, tid: int) -> None:
        self._write({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})

    def _write(self, event: dict[str, object]) -> None:
        text = self._separator + json.dumps(event)
        self._file.write(text)
        self._separator = ",\n"
        self._room -= len(text)


def free_timeline_path(run_dir: Path) -> Path:
    """Return ``timeline.json``, or ``timeline-2.json`` and so on for a run that goes on in its folder."""
    path, number = run_dir / "timeline.json", 1
    while path.exists():
        number += 1
        path = run_dir / f"timeline-{number}.json"
    return path
