"""One run's folder and display: everything that a person sees of a training run.

    runs/<name>/config.resolved.yaml     what ran, written first
    runs/<name>/metrics.jsonl            one object per step, on disk before the next step starts
    runs/<name>/tensorboard/             the same numbers
    runs/<name>/timeline.json            phases of the controller and calls of the ranks, as a Chrome trace
    runs/<name>/rollouts/step_*.parquet  every sample with tokens, log-probs and reward
    runs/<name>/evaluations/version_*.parquet  the samples of the evaluation of a policy version, in the same columns
    runs/<name>/hang/stacks.txt          what every process was doing when the run had stopped moving, by ``hang_report.py``
    runs/<name>/report.html              curves and sample rollouts in one self-contained page

Invariants: nothing of an earlier run is overwritten, a second run called ``calc`` goes to ``calc-2``, unless it goes on with the
first one (:meth:`RunRecorder.resume`), which drops the steps that will come again; every file is whole
at any moment, because files are appended to by whole lines or replaced by rename. A killed run loses at most the step
that it was in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType

from hybridrl.observability.files import create_run_dir, write_text_atomic
from hybridrl.observability.metrics_log import MetricsLog
from hybridrl.observability.phases import PhaseTimer
from hybridrl.observability.progress import Progress, open_progress
from hybridrl.observability.records import Metric, Outcome, RolloutRecord
from hybridrl.observability.report import Decode, Report
from hybridrl.observability.rollout_file import write_rollouts
from hybridrl.observability.timeline import Timeline, free_timeline_path
from hybridrl.observability.trackers.tracker import Tracker


class RunRecorder:
    """Writes one run's folder and drives its progress display. Use it as a context manager.

    Args:
        runs_dir: Folder of all runs; made when missing.
        name: Name of the run; the folder gets a numeric suffix when it exists.
        resolved_config: YAML text of the configuration that runs.
        num_steps: Steps that the run intends to take.
        decode: Turns token ids into text, for the report.
        report_interval_s: Least seconds between two rewrites of the report.
        is_continued: Whether to go on in the folder of that name when it exists.
        progress: Display; None takes a live one on a terminal and plain lines elsewhere.

    Attributes:
        run_dir: The run's folder.
        timeline: Has the phases; calls of ranks are added to it.
    """

    def __init__(
        self,
        runs_dir: Path,
        name: str,
        resolved_config: str,
        num_steps: int,
        *,
        decode: Decode = str,
        report_interval_s: float = 10.0,
        is_continued: bool = False,
        progress: Progress | None = None,
    ) -> None:
        is_there = is_continued and (runs_dir / name).is_dir()
        self.run_dir = runs_dir / name if is_there else create_run_dir(runs_dir, name)
        write_text_atomic(self.run_dir / "config.resolved.yaml", resolved_config)
        self._log = MetricsLog(self.run_dir)
        self._trackers: list[Tracker] = []
        self.timeline = Timeline(free_timeline_path(self.run_dir))
        self._report = Report(self.run_dir / "report.html", self.run_dir.name, num_steps, resolved_config, decode)
        self._report_interval_s = report_interval_s
        self._report_written_at = float("-inf")
        self._progress = open_progress(self.run_dir.name, num_steps) if progress is None else progress
        self._phases = PhaseTimer(self._progress.phases, partial(self.timeline.add, "controller", "phases"))
        self._evaluation: dict[str, Metric] = {}
        self._held_out: tuple[RolloutRecord, ...] = ()
        self._closed = False

    def status(self, text: str) -> None:
        """Show what is going on outside steps, such as ``starting 4 Megatron ranks``."""
        self._progress.status(text)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the step; the step's metrics get ``time_s/<name>``."""
        return self._phases.phase(name)

    def running_phases(self) -> tuple[str, ...]:
        """Return the parts of the step that run now; any thread may ask."""
        return self._phases.running

    def resume(self, step: int) -> None:
        """Go on with a run before `step`; what the folder has of that step and later ones will come again, and is dropped."""
        for number, metrics in self._log.resume(step):
            self._report.add_metrics(number, metrics)
        for path in (
            *self.run_dir.glob("rollouts/step_*.parquet"),
            *self.run_dir.glob("replays/step_*.parquet"),
            *self.run_dir.glob("evaluations/version_*.parquet"),
        ):
            first_dropped = step + 1 if path.parent.name == "evaluations" else step
            if int(path.stem.rpartition("_")[2]) >= first_dropped:
                path.unlink()

    def track(self, tracker: Tracker) -> None:
        """Give a tracker the metrics of every step from now on."""
        self._trackers.append(tracker)

    def start_steps(self) -> None:
        """Start the clock of the next step anew, so that start-up does not count as its time."""
        self._phases.take()

    def record_evaluation(
        self, version: int, metrics: Mapping[str, Metric], rollouts: Sequence[RolloutRecord] = ()
    ) -> None:
        """Keep the ``eval/*`` metrics for the object of the step that is recorded next; a later evaluation replaces them.

        Args:
            version: Policy version that was evaluated, which is the number of steps that it was trained for.
            rollouts: Its samples; some of them are shown with those of that step.
        """
        self._evaluation = dict(metrics)
        self._held_out = tuple(rollouts)
        if rollouts:
            write_rollouts(self.run_dir / "evaluations" / f"version_{version:06d}.parquet", version, rollouts)
        self._progress.evaluation(version, metrics)

    def record_step(self, step: int, metrics: Mapping[str, Metric], rollouts: Sequence[RolloutRecord]) -> None:
        """Write everything about one finished step.

        Args:
            step: Number of the step, from 0.
            metrics: Its metrics by name; phase times and the last evaluation since the step before are added.
            rollouts: The samples it trained on.
        """
        merged: dict[str, Metric] = {**self._phases.take(), **metrics, **self._evaluation}
        self._evaluation = {}
        self._write(step, merged)
        self.timeline.flush()
        if rollouts:
            write_rollouts(self.run_dir / "rollouts" / f"step_{step:06d}.parquet", step, rollouts)
            self._report.add_rollouts(step, rollouts, self._held_out)
        self._held_out = ()
        self._progress.step(step, merged)
        if time.monotonic() - self._report_written_at >= self._report_interval_s:
            self._report.write(Outcome.RUNNING)
            self._report_written_at = time.monotonic()

    def close(self, outcome: Outcome = Outcome.FINISHED) -> Path:
        """Write what is pending, stop the display and return the path of the report. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._log.close()
            self.timeline.close()
            for tracker in list(self._trackers):
                self._guard(tracker, partial(tracker.close, outcome))
            self._report.write(outcome)
            self._progress.close()
        return self._report.path

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.close(Outcome.INTERRUPTED if issubclass(kind, KeyboardInterrupt) else Outcome.FAILED)

    def _write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        self._log.append(step, metrics)
        self._report.add_metrics(step, metrics)
        for tracker in list(self._trackers):
            self._guard(tracker, partial(tracker.append, step, metrics))

    def _guard(self, tracker: Tracker, action: Callable[[], None]) -> None:
        """Act on a tracker, and go on without it when that fails: the run's own files have everything."""
        try:
            action()
        except Exception as e:  # noqa: BLE001  # another program's client, at a process boundary
            self._trackers.remove(tracker)
            self._progress.status(f"{tracker.name}: {type(e).__name__}: {e}; the run goes on without it")
