"""Do the engines compute what transformers computes? Asked before a run, of the model and the layout that it configures.

    transformers (one process) -> Megatron on one rank, operator by operator -> Megatron in the configured layout (Ray) -> vLLM

All score the same random tokens in float32, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from hybridrl.config.choices import Precision, RouterReplay
from hybridrl.config.schema import ExperimentConfig
from hybridrl.controller.hang_watch import HangWatch
from hybridrl.controller.scoring import score_with_megatron, score_with_transformers, score_with_vllm
from hybridrl.controller.startup import start_actor
from hybridrl.controller.stopping import EXIT_FAILED
from hybridrl.data.batch import SequenceBatch
from hybridrl.errors import ConfigError, EngineError
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.parity.activations import Floats, Operator, Site
from hybridrl.parity.compare import LogprobGap, token_logprobs
from hybridrl.parity.options import ParityOptions
from hybridrl.parity.report import ParityReport, make_report
from hybridrl.parity.table import parity_table
from hybridrl.roles.future import wait_for

_TABLE_WIDTH = 128
Status = Callable[[str], None]


def parity(config: ExperimentConfig, options: ParityOptions) -> int:
    """Compare, print the tables; return the exit code, 1 when something is over its tolerance.

    Raises:
        ConfigError: The model does not fit into memory in float32.
        EngineError: An engine did not start, or its process died.
    """
    console = Console()
    console = console if console.is_terminal else Console(width=_TABLE_WIDTH)
    report = compare_engines(config, options, Path(config.runs_dir) / f"{config.name}-parity", console.print)
    console.print(parity_table(report))
    return 0 if report.is_ok else 1


def require_parity(config: ExperimentConfig, run_dir: Path, status: Status) -> None:
    """Compare as :func:`parity` does, before a run.

    Raises:
        EngineError: Something is over its tolerance; says what and why.
    """
    report = compare_engines(config, ParityOptions(), run_dir, status)
    if not report.is_ok:
        raise EngineError("\n".join(["trainer.parity_check: the engines disagree", *report.findings()]))
    status(report.findings()[0])


def compare_engines(config: ExperimentConfig, options: ParityOptions, run_dir: Path, status: Status) -> ParityReport:
    """Score with every engine.

    Args:
        run_dir: Gets the logs of worker processes after an error.
        status: Told what goes on.

    Raises:
        ConfigError: The model does not fit into memory in float32.
        EngineError: An engine did not start, or its process died.
    """
    spec = read_model_spec(Path(config.model.path))
    check_memory(spec, _free_bytes())
    token_ids = _token_ids(config, spec, options.num_tokens)
    status("parity: transformers")
    reference = score_with_transformers(config, token_ids)
    logits = reference.values[Site(Operator.LOGITS)]
    want = token_logprobs(logits, token_ids)
    status("parity: Megatron, one rank")
    megatron = score_with_megatron(config, token_ids)
    one_rank = _gap("Megatron model, one rank", megatron.values[Site(Operator.LOGITS)], logits, token_ids)
    status("parity: Megatron, configured layout")
    layout = LogprobGap(_layout_name(config), _largest(_logprobs_in_layout(config, token_ids, run_dir) - want))
    vllm = None
    if options.has_vllm:
        status("parity: vLLM")
        vllm = _gap("vLLM", score_with_vllm(config, token_ids), logits, token_ids)
    return make_report(options, reference, megatron, one_rank, layout, vllm)


def check_memory(spec: ModelSpec, free_bytes: int) -> None:
    """Refuse a model that no process could hold in float32.

    Raises:
        ConfigError: With both sizes.
    """
    num_parameters = sum(math.prod(tensor.shape) for tensor in spec.tensors().values())
    needed_bytes = 4 * num_parameters
    if needed_bytes > free_bytes:
        problem = (
            f"model.path: got a model of {num_parameters:,} parameters, {needed_bytes / 2**30:,.1f} GiB in float32, expected at "
            f"most the {free_bytes / 2**30:,.1f} GiB of memory that are free; compare a model of the same family with fewer layers"
        )
        raise ConfigError([problem])


def _free_bytes() -> int:
    """Return the memory that can be had without swapping."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _token_ids(config: ExperimentConfig, spec: ModelSpec, num_tokens: int) -> list[int]:
    """Draw tokens; as many as model, sampler and micro-batches take."""
    size = min(num_tokens, spec.max_positions, config.rollout.max_model_tokens)
    drawn: list[int] = np.random.default_rng(config.seed).integers(0, spec.vocab_size, size).tolist()
    return drawn


def _logprobs_in_layout(config: ExperimentConfig, token_ids: list[int], run_dir: Path) -> Floats:
    """Return log-probs of tokens 1.. by the ranks that a run would start, [dp, tokens - 1]: every dp rank scores the sequence."""
    plain = replace(
        config,
        model=replace(config.model, precision=Precision.FLOAT32),
        actor=replace(config.actor, router_replay=RouterReplay.OFF),
        rollout=replace(config.rollout, temperature=1.0),
    )
    size = parallel_sizes(config.actor.parallel).dp
    batch = SequenceBatch(
        np.tile(np.array(token_ids, dtype=np.int32), (size, 1)), np.full(size, len(token_ids), dtype=np.int32)
    )
    with (
        HangWatch(config.trainer, run_dir, lambda: ("parity",), EXIT_FAILED) as watch,
        start_actor(plain, 1, run_dir, watch) as actor,
    ):
        return wait_for(actor.logprobs(batch)).logprobs[:, 1:]


def _layout_name(config: ExperimentConfig) -> str:
    parallel = config.actor.parallel
    degrees = {axis: getattr(parallel, f"{axis}_size") for axis in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp")}
    return "Megatron engine, " + (
        " ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "one rank"
    )


def _gap(engine: str, got: Floats, logits: Floats, token_ids: list[int]) -> LogprobGap:
    logprobs = token_logprobs(got, token_ids) - token_logprobs(logits, token_ids)
    return LogprobGap(engine, _largest(logprobs), _largest(got - logits[: len(got)]))


def _largest(gaps: Floats) -> float:
    return float(np.abs(gaps).max())
