"""What a person sees while a run goes on: a live panel on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hybridrl.observability.records import Metric

_BLOCKS = "▁▂▃▄▅▆▇█"
_PHASE_WIDTH = 32
_SPARK_WIDTH = 48
_NUMBERS = {
    "reward/mean": ("reward", "{:.3f}"),
    "eval/accuracy": ("accuracy", "{:.3f}"),
    "response_tokens/mean": ("response tokens", "{:.1f}"),
    "throughput/tokens_per_s": ("tokens/s", "{:,.0f}"),
    "actor/entropy": ("entropy", "{:.3f}"),
    "actor/grad_norm": ("grad norm", "{:.3f}"),
    "logprob/rollout_vs_old_abs_max": ("log-prob gap", "{:.1e}"),
    "policy_version": ("policy version", "{:.0f}"),
}


class Progress(Protocol):
    """A display of one run."""

    def status(self, text: str) -> None:
        """Show what is going on outside steps."""
        ...

    def phases(self, running: tuple[str, ...]) -> None:
        """Show which phases run now."""
        ...

    def evaluation(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Show the result of an evaluation."""
        ...

    def step(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Show a finished step."""
        ...

    def close(self) -> None:
        """Leave the display; the last state stays readable."""
        ...


def open_progress(name: str, num_steps: int, console: Console | None = None) -> Progress:
    """Return a live display when `console` (default: standard output) is a terminal, else a plain one."""
    console = console or Console()
    return LiveProgress(name, num_steps, console) if console.is_terminal else PlainProgress(num_steps)


def phase_seconds(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the seconds of each phase in `metrics`, without the whole step."""
    prefix = "time_s/"
    times = {name.removeprefix(prefix): float(value) for name, value in metrics.items() if name.startswith(prefix)}
    times.pop("step", None)
    return times


class PlainProgress:
    """One line per event, flushed, for logs and pipes."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def status(self, text: str) -> None:
        """Print the text."""
        print(text, flush=True)

    def phases(self, running: tuple[str, ...]) -> None:
        """Print nothing: the step's line has the times."""

    def evaluation(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Print the evaluation."""
        numbers = "  ".join(f"{name.removeprefix('eval/')} {float(value):.4g}" for name, value in metrics.items())
        print(f"evaluation after step {step}/{self._num_steps}  {numbers}", flush=True)

    def step(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Print the step's main numbers and the time of each phase."""
        parts = [f"step {step + 1}/{self._num_steps}"]
        parts += [f"{label} {text}" for label, text in _labelled(metrics)]
        parts += [f"{name} {seconds:.2f}s" for name, seconds in phase_seconds(metrics).items()]
        if "time_s/step" in metrics:
            parts.append(f"step {metrics['time_s/step']:.2f}s")
        print("  ".join(parts), flush=True)

    def close(self) -> None:
        """Do nothing: every line is out."""


class LiveProgress:
    """A panel that is redrawn in place: progress, main numbers, reward curve and phase times."""

    def __init__(self, name: str, num_steps: int, console: Console) -> None:
        self._name = name
        self._num_steps = num_steps
        self._num_done = 0
        self._metrics: dict[str, Metric] = {}
        self._rewards: deque[float] = deque(maxlen=_SPARK_WIDTH)
        self._running: tuple[str, ...] = ()
        self._first_step_at: float | None = None
        self._spinner = Spinner("dots", text="starting")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=False)
        self._live.start()

    def status(self, text: str) -> None:
        """Show the text beside the spinner."""
        self._spinner.update(text=text)

    def phases(self, running: tuple[str, ...]) -> None:
        """Show the running phases beside the spinner."""
        self._running = running
        if running:
            self._spinner.update(text=" + ".join(running))

    def evaluation(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Keep the evaluation's numbers on display until the next one."""
        self._metrics.update(metrics)

    def step(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Show the step's numbers."""
        if self._first_step_at is None:
            self._first_step_at = time.monotonic() - float(metrics.get("time_s/step", 0.0))
        self._num_done = step + 1
        self._metrics.update(metrics)
        if "reward/mean" in metrics:
            self._rewards.append(float(metrics["reward/mean"]))

    def close(self) -> None:
        """Draw the last state and leave it on the screen."""
        self._spinner.update(text="done")
        self._live.stop()

    def _render(self) -> RenderableType:
        if not self._num_done:
            return Panel(self._spinner, title=self._name, title_align="left", border_style="cyan")
        body = Group(self._bar(), Text(), self._numbers(), Text(), self._times(), Text(), self._spinner)
        return Panel(body, title=self._name, title_align="left", border_style="cyan")

    def _bar(self) -> RenderableType:
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(f"step {self._num_done}/{self._num_steps}", style="bold"),
            ProgressBar(total=self._num_steps, completed=self._num_done, width=_SPARK_WIDTH),
            Text(f"{_clock(self._elapsed())} so far, about {_clock(self._remaining())} left", style="dim"),
        )
        row.add_row(Text("reward", style="bold"), Text(_sparkline(self._rewards), style="green"))
        return row

    def _numbers(self) -> RenderableType:
        grid = Table.grid(padding=(0, 3))
        shown = _labelled(self._metrics)
        for start in range(0, len(shown), 4):
            grid.add_row(
                *(Text.assemble((f"{label} ", "dim"), (text, "bold")) for label, text in shown[start : start + 4])
            )
        return grid

    def _times(self) -> RenderableType:
        times = phase_seconds(self._metrics)
        longest = max(times.values(), default=0.0) or 1.0
        grid = Table.grid(padding=(0, 2))
        for name, seconds in times.items():
            bar = "━" * max(1, round(_PHASE_WIDTH * seconds / longest))
            style = "yellow" if name in self._running else "cyan"
            grid.add_row(Text(name, style=style), Text(f"{seconds:.2f} s", justify="right"), Text(bar, style=style))
        return grid

    def _elapsed(self) -> float:
        return 0.0 if self._first_step_at is None else time.monotonic() - self._first_step_at

    def _remaining(self) -> float:
        return self._elapsed() / max(self._num_done, 1) * (self._num_steps - self._num_done)


def _labelled(metrics: Mapping[str, Metric]) -> list[tuple[str, str]]:
    """Return label and text of the main numbers that `metrics` has."""
    return [(label, form.format(float(metrics[name]))) for name, (label, form) in _NUMBERS.items() if name in metrics]


def _sparkline(values: deque[float]) -> str:
    """Return one block character per value, scaled between the smallest and the largest."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(_BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1))] for value in finite)


def _clock(seconds: float) -> str:
    """Return ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
