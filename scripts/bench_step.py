"""What the framework costs at the demo size, measured in one go.

    step     wall time of training steps, less the time inside the engines, over wall time
    rollout  tokens/s of a replica with its agent loop, over tokens/s of plain ``vllm.LLM.generate`` on the same prompts

Inside the engines is, for every call of a phase, the time of its slowest rank; for generation, the time in which at least one
request is with vLLM. The rollout part alternates between both sides. The plain side gets the turns of all samples as one call
per turn, with prompts and lengths as the replica's samples had them, so both sides generate equally many tokens.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from hybridrl.config.schema import ExperimentConfig
from hybridrl.controller.run import train
from hybridrl.data.dataset import open_dataset
from hybridrl.data.sample import Sample
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.preflight.check import load_checked
from hybridrl.preflight.command import Command
from hybridrl.roles import megatron_pool, rollout_group
from hybridrl.roles.future import wait_for
from hybridrl.roles.megatron_worker import MegatronWorker
from hybridrl.roles.placement import place_pool
from hybridrl.roles.resources import Cluster
from hybridrl.roles.rollout_group import RolloutReplicas
from hybridrl.roles.rollout_replica import RolloutLaunch, RolloutReplica

CALC = Path(__file__).resolve().parent.parent / "configs" / "demo" / "calc.yaml"
LOG_FOLDER_VARIABLE = "HYBRIDRL_BENCH_FOLDER"
# Calls of one phase run at the same time on all ranks of these methods; the slowest counts.
PHASES = (
    ("generate",),
    ("logprobs",),
    ("update",),
    ("pause",),
    ("send_weights", "receive_weights"),
    ("commit",),
    ("resume",),
)
WARMUP_STEPS, WARMUP_ROUNDS = 3, 2
MAX_TAX, MIN_THROUGHPUT = 0.05, 0.9


class CallLog:
    """Appends the seconds of each call of one worker to a file of its own."""

    def __init__(self, name: str) -> None:
        self._file = (Path(os.environ[LOG_FOLDER_VARIABLE]) / f"{name}.jsonl").open("a", buffering=1)

    def add(self, method: str, seconds: float) -> None:
        """Note one call."""
        self._file.write(json.dumps([method, seconds]) + "\n")

    @contextmanager
    def time(self, method: str) -> Iterator[None]:
        """Time a call and note it."""
        started = time.perf_counter()
        yield
        self.add(method, time.perf_counter() - started)


class TimedMegatronWorker(MegatronWorker):
    """A training rank that notes the time of each engine call."""

    def __init__(self, rank: int, launch: Any) -> None:
        super().__init__(rank, launch)
        self._log = CallLog(f"actor-{rank}")

    def logprobs(self, *arguments: Any) -> Any:
        """Time a log-prob pass."""
        with self._log.time("logprobs"):
            return super().logprobs(*arguments)

    def update(self, *arguments: Any) -> Any:
        """Time an update."""
        with self._log.time("update"):
            return super().update(*arguments)

    def send_weights(self, *arguments: Any) -> Any:
        """Time one side of a transfer."""
        with self._log.time("send_weights"):
            return super().send_weights(*arguments)


class TimedReplica(RolloutReplica):
    """A replica that notes the time of each engine call, and the time in which vLLM has any request."""

    def __init__(self, replica: int, *arguments: Any) -> None:
        super().__init__(replica, *arguments)
        self._log = CallLog(f"rollout-{replica}")
        self._num_running, self._busy_since, self._busy_s = 0, 0.0, 0.0

    async def start(self, is_joining: bool) -> Any:
        """Start vLLM and put clocks around its methods."""
        maps = await super().start(is_joining)
        for method in ("pause", "receive", "commit", "resume"):
            name = {"receive": "receive_weights"}.get(method, method)
            setattr(self._engine, method, self._timed(getattr(self._engine, method), name))
        self._engine.generate = self._counted(self._engine.generate)
        return maps

    async def generate(self, *arguments: Any) -> list[Sample]:
        """Note the time in which vLLM had any request."""
        self._busy_s = 0.0
        samples = await super().generate(*arguments)
        self._log.add("generate", self._busy_s)
        return samples

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        async def timed(*arguments: Any, **keywords: Any) -> Any:
            with self._log.time(name):
                return await call(*arguments, **keywords)

        return timed

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        async def counted(*arguments: Any) -> Any:
            if self._num_running == 0:
                self._busy_since = time.perf_counter()
            self._num_running += 1
            try:
                return await call(*arguments)
            finally:
                self._num_running -= 1
                if self._num_running == 0:
                    self._busy_s += time.perf_counter() - self._busy_since

        return counted


class PlainVllm:
    """``vllm.LLM`` with the settings of a replica and nothing of ours around it."""

    def start(self, launch: RolloutLaunch, is_in_process: bool) -> None:
        """Load the checkpoint; vLLM's own default is an engine process of its own."""
        from hybridrl.engines.vllm.settings import engine_arguments, environment

        os.environ.update(environment(launch.platform, launch.rollout, None))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if is_in_process else "1"
        from vllm import LLM

        arguments = asdict(engine_arguments(launch.folder, launch.platform, launch.rollout, launch.seed))
        names = ("model", "dtype", "max_model_len", "max_num_seqs", "enforce_eager", "seed", "skip_tokenizer_init",
                 "generation_config", "logprobs_mode", "enable_prefix_caching", "enable_chunked_prefill")  # fmt: skip
        self._llm = LLM(**{name: arguments[name] for name in names})

    def generate(self, turns: Sequence[Sequence[tuple[tuple[int, ...], dict[str, Any]]]]) -> tuple[int, float]:
        """Generate turn after turn; return the number of tokens and the seconds."""
        from vllm import SamplingParams, TokensPrompt

        requests = [
            (
                [TokensPrompt(prompt_token_ids=list(ids)) for ids, _ in turn],
                [SamplingParams(**spec) for _, spec in turn],
            )
            for turn in turns
        ]
        started, num_tokens = time.perf_counter(), 0
        for prompts, params in requests:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            num_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        seconds = time.perf_counter() - started
        assert self._llm.reset_prefix_cache()
        return num_tokens, seconds


@dataclass(frozen=True, slots=True)
class StepResult:
    """Medians over steps, in seconds."""

    step_s: float
    engines_s: float
    tax: float
    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """Medians over rounds, in tokens per second."""

    replica_tokens_per_s: float
    plain_tokens_per_s: float
    ratio: float


def bench_steps(config: ExperimentConfig, folder: Path) -> StepResult:
    """Train and compare the wall time of steps with the time inside the engines."""
    os.environ[LOG_FOLDER_VARIABLE] = str(folder)
    megatron_pool.MegatronWorker = TimedMegatronWorker
    rollout_group.RolloutReplica = TimedReplica
    try:
        with redirect_stdout(io.StringIO()):
            train(config)
    finally:
        megatron_pool.MegatronWorker, rollout_group.RolloutReplica = MegatronWorker, RolloutReplica
    rows = [json.loads(line) for line in (folder / config.name / "metrics.jsonl").read_text().splitlines()]
    calls: dict[str, list[list[float]]] = defaultdict(list)
    for path in folder.glob("*-*.jsonl"):
        by_method: dict[str, list[float]] = defaultdict(list)
        for method, seconds in map(json.loads, path.read_text().splitlines()):
            by_method[method].append(seconds)
        for method, series in by_method.items():
            calls[method].append(series)
    steps = range(WARMUP_STEPS, len(rows))
    phases = {
        "+".join(methods): [max(series[step] for method in methods for series in calls[method]) for step in steps]
        for methods in PHASES
    }
    walls = [rows[step]["time_s/step"] for step in steps]
    engines = [sum(series[index] for series in phases.values()) for index in range(len(steps))]
    taxes = [1 - engine / wall for engine, wall in zip(engines, walls, strict=True)]
    medians = {name: statistics.median(series) for name, series in phases.items()}
    return StepResult(statistics.median(walls), statistics.median(engines), statistics.median(taxes), medians)


def bench_rollout(config: ExperimentConfig, num_rounds: int, *, is_plain_in_process: bool) -> RolloutResult:
    """Alternate between a replica and plain vLLM on the same prompts."""
    folder = Path(config.model.path)
    prompts = open_dataset(config.data, load_tokenizer(folder), config.seed).train.take(
        config.algorithm.prompts_per_step
    )
    launch = RolloutLaunch(folder, config.rollout, config.platform, config.data.task, config.seed)
    placed = place_pool(config.platform, 1, 1, config.rollout.tp_size)
    rates: dict[str, list[float]] = {"replica": [], "plain": []}
    with Cluster(None, placed.num_cpus) as cluster:
        pool = cluster.pool(placed.bundles, 60.0)
        plain: Any = pool.start_actor(PlainVllm, placed.ranks[0])
        replicas = RolloutReplicas(pool, placed.replicas, launch, timeouts=config.trainer)
        wait_for(replicas.start())
        ray.get(plain.start.remote(launch, is_plain_in_process), timeout=config.trainer.startup_timeout_s)
        for number in range(WARMUP_ROUNDS + num_rounds):
            started = time.perf_counter()
            samples = wait_for(replicas.generate(0, prompts, config.algorithm.samples_per_prompt))
            seconds = time.perf_counter() - started
            num_plain_tokens, plain_s = ray.get(plain.generate.remote(as_turns(samples, config)), timeout=300)
            wait_for(replicas.pause(60.0))  # drops the prefix cache, as a weight sync does
            wait_for(replicas.resume(60.0))
            if number >= WARMUP_ROUNDS:
                rates["replica"].append(sum(sample.num_response_tokens for sample in samples) / seconds)
                rates["plain"].append(num_plain_tokens / plain_s)
        replicas.close()
    replica, plain_rate = (statistics.median(rates[name]) for name in ("replica", "plain"))
    ratio = statistics.median(a / b for a, b in zip(rates["replica"], rates["plain"], strict=True))
    return RolloutResult(replica, plain_rate, ratio)


def as_turns(samples: Sequence[Sample], config: ExperimentConfig) -> list[list[tuple[tuple[int, ...], dict[str, Any]]]]:
    """Return the requests of each turn of finished samples: prompt ids and sampling parameters that end where they ended."""
    turns: dict[int, list[tuple[tuple[int, ...], dict[str, Any]]]] = defaultdict(list)
    for sample in samples:
        edges = [0, *(i for i in range(1, len(sample.loss_mask)) if sample.loss_mask[i] != sample.loss_mask[i - 1])]
        starts = [start for start in edges if sample.loss_mask[start]]
        for turn, start in enumerate(starts):
            stop = next((edge for edge in edges if edge > start), len(sample.loss_mask))
            spec = {"temperature": config.rollout.temperature, "logprobs": 0, "detokenize": False, "ignore_eos": True}
            ids = tuple(int(token) for token in sample.token_ids[:start])
            turns[turn].append((ids, spec | {"max_tokens": stop - start}))
    return [turns[turn] for turn in sorted(turns)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help=f"training steps, {WARMUP_STEPS} of them to warm up")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the rollout part, after a warm-up")
    parser.add_argument(
        "--plain-in-process",
        action="store_true",
        help="run plain vLLM's engine in the caller's process, not its default",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of calc.yaml")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hybridrl-bench-") as scratch:
        overrides = [f"runs_dir={scratch}", f"trainer.num_steps={arguments.steps}", "trainer.eval_every_steps=0"]
        overrides += ["trainer.save_hf_at_end=false", "name=bench", *arguments.overrides]
        config = load_checked(CALC, overrides, Command.TRAIN).config
        step = bench_steps(config, Path(scratch))
        rollout = bench_rollout(config, arguments.rounds, is_plain_in_process=arguments.plain_in_process)
    show(step, rollout)
    if arguments.json:
        arguments.json.write_text(json.dumps({"step": asdict(step), "rollout": asdict(rollout)}, indent=2) + "\n")


def show(step: StepResult, rollout: RolloutResult) -> None:
    """Print both tables."""
    table = Table(title="one step, median")
    for column in ("phase", "seconds", "of the step"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for name, seconds in step.phases_s.items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / step.step_s:.1%}")
    table.add_row("inside the engines", f"{step.engines_s:.3f}", f"{step.engines_s / step.step_s:.1%}")
    table.add_row("step", f"{step.step_s:.3f}", "100.0%")
    console = Console()
    console.print(table)
    console.print(f"framework tax {step.tax:.1%} (goal: at most {MAX_TAX:.0%})")
    console.print(
        f"rollout {rollout.replica_tokens_per_s:,.0f} tokens/s, plain vLLM {rollout.plain_tokens_per_s:,.0f} tokens/s: "
        f"ratio {rollout.ratio:.2f} (goal: at least {MIN_THROUGHPUT})"
    )


if __name__ == "__main__":
    main()
