"""Folders of small runs, written by the recorder itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridrl.observability.progress import PlainProgress
from hybridrl.observability.recorder import RunRecorder
from hybridrl.observability.records import RolloutRecord
from tests.unit.observability.rollouts import make_rollout


def write_run(
    runs_dir: Path,
    name: str = "calc",
    *,
    num_steps: int = 6,
    config: str = "",
    slope: float = 0.1,
    rollouts: Sequence[RolloutRecord] = (),
) -> Path:
    """Write a run whose reward grows by `slope` per step, with an evaluation before the first step and after every other one."""
    text = f"name: {name}\nmodel:\n  path: nowhere\n{config}"
    with RunRecorder(runs_dir, name, text, num_steps, report_interval_s=1e9, progress=PlainProgress(num_steps)) as run:
        run.record_evaluation(0, {"eval/accuracy": 0.0}, [make_rollout(7)])
        for step in range(num_steps):
            metrics = {"reward/mean": slope * step, "actor/entropy": 1.0, "time_s/rollout": 2.0, "time_s/step": 3.0}
            if step % 2:
                run.record_evaluation(step + 1, {"eval/accuracy": slope * step})
            run.record_step(step, metrics, rollouts or [make_rollout(0), make_rollout(1)])
    return run.run_dir
