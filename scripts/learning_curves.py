"""Trains one task with one algorithm after another, over several seeds and with the same budget, and prints the curves as Markdown.

    python scripts/learning_curves.py OUT [--task reverse] [--seeds 1 2 3] [--algorithms grpo ppo ...]

Each run is the task's demo on one training rank and one replica, with the preset of configs/algorithms included, or the demo of task
and algorithm where there is one. OUT keeps the runs; those that are finished are not run again.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.errors import DataError
from hybridrl.observability.run_folder import open_run

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
ALGORITHMS = ("ppo", "grpo", "rloo", "dapo", "gspo", "reinforce_pp")
NUM_STEPS, EVAL_EVERY = 40, 10


@dataclass(frozen=True, slots=True)
class Curve:
    """What one run measured.

    Attributes:
        rewards: Mean reward of each step.
        accuracies: Held-out accuracy before training and after every 10 steps.
    """

    rewards: tuple[float, ...]
    accuracies: tuple[float, ...]


def run(out: Path, task: str, algorithm: str, seed: int, overrides: Sequence[str]) -> Curve:
    """Train, unless `out` holds the finished run, and read its metrics."""
    name = f"{task}-{algorithm}-{seed}"
    if num_steps_of(out / name) < NUM_STEPS:
        shutil.rmtree(out / name, ignore_errors=True)
        demo, own = (CONFIGS / "demo" / f"{stem}.yaml" for stem in (task, f"{task}-{algorithm}"))
        preset = "" if algorithm == "grpo" else f", {CONFIGS / 'algorithms' / f'{algorithm}.yaml'}"
        config = out / f"{name}.yaml"
        config.write_text(f"include: {own}\n" if own.exists() else f"include: [{demo}{preset}]\n")
        one_rank = [f"actor.parallel.{axis}_size=1" for axis in ("tp", "pp", "ep")]
        settings = [f"runs_dir={out}", f"name={name}", f"seed={seed}", "trainer.save_hf_at_end=false", *one_rank]
        settings += [f"trainer.num_steps={NUM_STEPS}", f"trainer.eval_every_steps={EVAL_EVERY}", *overrides]
        command = [sys.executable, "-m", "hybridrl.cli.main", "train", str(config), *settings]
        subprocess.run(command, check=True, stdout=sys.stderr)
    series = open_run(out / name).metrics().series
    rewards, accuracies = ([v for v in series[key] if v is not None] for key in ("reward/mean", "eval/accuracy"))
    return Curve(tuple(rewards), tuple(accuracies))


def num_steps_of(folder: Path) -> int:
    """Return how many steps a run has finished; 0 when it has not begun."""
    try:
        return len(open_run(folder).metrics().steps)
    except DataError:
        return 0


def table(curves: dict[str, list[Curve]]) -> str:
    """Return the held-out accuracy of each algorithm: its mean over seeds, and the lowest and highest seed at the end."""
    marks = range(0, NUM_STEPS + 1, EVAL_EVERY)
    lines = ["| algorithm | " + " | ".join(f"step {mark}" for mark in marks) + " | seeds at the end |"]
    lines.append("| --- " * (len(marks) + 2) + "|")
    for name, runs in curves.items():
        means = [statistics.mean(values) for values in zip(*(run.accuracies for run in runs), strict=True)]
        last = ", ".join(f"{run.accuracies[-1]:.3f}" for run in runs)
        lines.append(f"| {name} | " + " | ".join(f"{mean:.3f}" for mean in means) + f" | {last} |")
    return "\n".join(lines)


def chart(task: str, curves: dict[str, list[Curve]]) -> str:
    """Return a Mermaid chart of the reward of training, the mean over seeds; lines in the order of `curves`."""
    lines = ["```mermaid", "xychart-beta", f'  title "{task}: mean reward, {", ".join(curves)}"']
    lines += [f'  x-axis "step" 1 --> {NUM_STEPS}', '  y-axis "reward" 0 --> 1']
    for runs in curves.values():
        means = [statistics.mean(values) for values in zip(*(run.rewards for run in runs), strict=True)]
        lines.append(f"  line [{', '.join(f'{mean:.2f}' for mean in means)}]")
    return "\n".join([*lines, "```"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", default="reverse", choices=("calc", "reverse"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.absolute()
    curves = {
        name: [run(out, options.task, name, seed, options.overrides) for seed in options.seeds]
        for name in options.algorithms
    }
    print(table(curves), chart(options.task, curves), sep="\n\n")


if __name__ == "__main__":
    main()
