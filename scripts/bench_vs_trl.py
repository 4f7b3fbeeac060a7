"""GRPO here against TRL's GRPOTrainer: the same task, model, batch and optimiser settings, in one run.

    python scripts/bench_vs_trl.py [--case demo] [--case moe] [--rounds 2]

One training rank and one replica here; TRL with HF generate in one process (``make .venv-trl/.packages`` installs it). Both sides may use
all cores, both in float32, and take turns. A step is everything between two updates: generation, reward, training, and here the
weight sync; start-up does not count.

    demo  the reverse task on the model of 1 million parameters: seconds per step, and of steps until the reward is 0.9
    moe   a mixture of experts of 25 million parameters, responses of up to 96 tokens: tokens per second

Neither side makes a separate pass for the log-probs before the update, which an on-policy step does not need.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hybridrl.observability.run_folder import open_run

ROOT = Path(__file__).resolve().parent.parent
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
NUM_CORES = len(os.sched_getaffinity(0))
WARMUP_STEPS = 3
GOAL, GOAL_WINDOW = 0.9, 3
MIN_THROUGHPUT = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """What both sides train.

    Attributes:
        experts: Implementation of the experts in transformers: the fastest one for this model.
    """

    name: str
    model: Path
    num_steps: int
    prompts_per_step: int
    max_response_tokens: int
    experts: str
    samples_per_prompt: int = 8
    lr: float = 3e-4
    warmup_steps: int = 3
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One training step of either side.

    Attributes:
        response_tokens: Mean per sample.
    """

    seconds: float
    reward: float
    response_tokens: float


def make_moe(folder: Path) -> Path:
    """Write a Qwen3-MoE of 25 million random parameters, whose vocabulary makes an early end rare."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hybridrl.data.tasks.demo_tokenizer import write_demo_tokenizer

    demo = json.loads((ROOT / "configs" / "demo" / "model" / "config.json").read_text())
    wider = {"vocab_size": 2048, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "head_dim": 64}
    experts = {"num_experts": 16, "moe_intermediate_size": 192, "intermediate_size": 768, "dtype": "float32"}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**demo | wider | experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_demo_tokenizer(folder)
    return folder


def run_ours(case: Case, folder: Path) -> list[Step]:
    """Train in a process of its own."""
    one_rank = {f"actor.parallel.{axis}_size": 1 for axis in ("tp", "pp", "ep")}
    settings = one_rank | {
        "runs_dir": folder,
        "name": "ours",
        "model.path": case.model,
        "actor.threads_per_rank": NUM_CORES,
        "rollout.threads_per_rank": NUM_CORES,
        "actor.micro_batch.tokens": 8192,
        "actor.optimizer.lr": case.lr,
        "actor.optimizer.warmup_steps": case.warmup_steps,
        "actor.optimizer.weight_decay": case.weight_decay,
        "algorithm.prompts_per_step": case.prompts_per_step,
        "algorithm.samples_per_prompt": case.samples_per_prompt,
        "algorithm.rollout_correction.old_policy": "bypass",
        "rollout.max_response_tokens": case.max_response_tokens,
        "rollout.max_model_tokens": 128,
        "rollout.max_running_samples": case.prompts_per_step * case.samples_per_prompt,
        "trainer.num_steps": case.num_steps,
        "trainer.eval_every_steps": 0,
        "trainer.save_hf_at_end": "false",
        "trainer.max_logprob_gap": "null",
    }
    config = ROOT / "configs" / "demo" / "reverse.yaml"
    _run([sys.executable, "-m", "hybridrl.cli.main", "train", config, *(f"{k}={v}" for k, v in settings.items())])
    series = open_run(folder / "ours").metrics().series
    columns = [series[name] for name in ("time_s/step", "reward/mean", "response_tokens/mean")]
    return [Step(*map(float, row)) for row in zip(*columns, strict=True)]


def run_trl(case: Case, folder: Path) -> list[Step]:
    """Train in TRL's environment, on the questions that ours gets."""
    from hybridrl.config.choices import TaskName
    from hybridrl.config.schema import DataConfig
    from hybridrl.data.dataset import open_dataset
    from hybridrl.data.tasks.demo_tokenizer import BOS, EOS
    from hybridrl.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(case.model)
    data = DataConfig(task=TaskName.REVERSE, max_prompt_tokens=16)
    drawn = open_dataset(data, tokenizer, seed=1).train.take(case.num_steps * case.prompts_per_step)
    prompts = [
        {"prompt": tokenizer.decode(prompt.token_ids).removeprefix(BOS), "answer": prompt.answer + EOS}
        for prompt in drawn
    ]
    shared = ("num_steps", "prompts_per_step", "samples_per_prompt", "max_response_tokens", "lr", "warmup_steps",
              "weight_decay", "experts")  # fmt: skip
    job = {name: getattr(case, name) for name in shared}
    job |= {"model": str(case.model), "scratch": str(folder / "trl"), "prompts": prompts, "num_threads": NUM_CORES}
    (folder / "job.json").write_text(json.dumps(job))
    output = _run([TRL_PYTHON, ROOT / "scripts" / "trl_grpo.py", folder / "job.json"])
    return [Step(**step) for step in json.loads(output.strip().splitlines()[-1])]


def _run(command: Sequence[str | Path]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": str(NUM_CORES)}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command[:3]))} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one run of one side.

    Attributes:
        step_s: Median over the steps after the first ones.
        tokens_per_s: Response tokens of those steps over their seconds.
        goal_s: Seconds of all steps until the mean of three rewards was at least 0.9; None when it never was.
    """

    case: str
    side: str
    step_s: float
    tokens_per_s: float
    goal_s: float | None


def summarise(case: Case, side: str, steps: Sequence[Step]) -> Result:
    later = steps[WARMUP_STEPS:]
    num_samples = case.prompts_per_step * case.samples_per_prompt
    tokens = sum(step.response_tokens for step in later) * num_samples
    rewards = [step.reward for step in steps]
    reached = [n for n in range(GOAL_WINDOW, len(steps) + 1) if statistics.mean(rewards[n - GOAL_WINDOW : n]) >= GOAL]
    goal_s = sum(step.seconds for step in steps[: reached[0]]) if reached else None
    seconds = [step.seconds for step in later]
    return Result(case.name, side, statistics.median(seconds), tokens / sum(seconds), goal_s)


def show(results: Sequence[Result]) -> None:
    table = Table("case", "side", "step (s)", "response tokens/s", f"to reward {GOAL} (s)", title="Here and TRL")
    for r in results:
        goal = "" if r.goal_s is None else f"{r.goal_s:.1f}"
        table.add_row(r.case, r.side, f"{r.step_s:.3f}", f"{r.tokens_per_s:,.0f}", goal)
    Console().print(table)
    for case in dict.fromkeys(result.case for result in results):
        ours, trl = (
            max(r.tokens_per_s for r in results if r.case == case and r.side == side) for side in ("ours", "trl")
        )
        goal = f" (goal {MIN_THROUGHPUT:.0f})" if case == "moe" else " (goal 1)"
        print(f"{case}: {ours / trl:.2f} times TRL's tokens per second, best runs{goal}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=("demo", "moe"), help="both when none is named")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--steps", type=int, help="steps of a run: 30 (demo) and 8 (moe)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args()
    if not TRL_PYTHON.exists():
        sys.exit("TRL is not installed; run: make .venv-trl/.packages")
    results = []
    with tempfile.TemporaryDirectory(prefix="hybridrl-bench-") as scratch:
        for name in options.case or ("demo", "moe"):
            if name == "demo":
                model = ROOT / "configs" / "demo" / "checkpoints" / "reverse"
                case = Case(name, model, options.steps or 30, 32, 12, "eager")
            else:
                with contextlib.redirect_stdout(io.StringIO()):
                    model = make_moe(Path(scratch) / "moe")
                case = Case(name, model, options.steps or 8, 16, 96, "grouped_mm", lr=1e-5)
            for number in range(options.rounds):
                for side, run in (("ours", run_ours), ("trl", run_trl)):
                    folder = Path(scratch) / f"{name}-{number}-{side}"
                    folder.mkdir()
                    results.append(summarise(case, side, run(case, folder)))
    show(results)
    if options.json:
        from dataclasses import asdict

        print(json.dumps({"results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
