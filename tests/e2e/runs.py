"""Whole runs of the demo configuration in the test's own process: real Ray, Megatron ranks and vLLM."""

from __future__ import annotations

import json
from pathlib import Path

from hybridrl.config.schema import ExperimentConfig
from hybridrl.layout.families import read_model_spec
from hybridrl.planning.cluster import read_cluster
from hybridrl.planning.weight_sync import plan_weight_sync
from hybridrl.preflight.check import load_checked
from hybridrl.preflight.command import Command

CALC = Path(__file__).parents[2] / "configs" / "demo" / "calc.yaml"


def demo_config(runs_dir: Path, name: str, *overrides: str, path: Path = CALC) -> ExperimentConfig:
    """Return the calc demo, or another configuration, a few steps long, without evaluation or export unless overridden."""
    short = ("trainer.num_steps=3", "trainer.eval_every_steps=0", "trainer.save_hf_at_end=false")
    settings = dict(setting.split("=", 1) for setting in (f"runs_dir={runs_dir}", f"name={name}", *short, *overrides))
    return load_checked(path, [f"{key}={value}" for key, value in settings.items()], Command.TRAIN).config


def one_rank(*overrides: str) -> tuple[str, ...]:
    """Return the overrides for a single training rank."""
    return tuple(f"actor.parallel.{axis}_size=1" for axis in ("tp", "pp", "ep")) + overrides


def planned_wire_bytes(config: ExperimentConfig) -> int:
    """Return what `hybridrl plan` says that a weight sync puts on the wire."""
    spec = read_model_spec(Path(config.model.path))
    return plan_weight_sync(config, spec, read_cluster(CALC.parents[1] / "clusters" / "cpu.yaml")).price.wire_bytes


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Return the objects of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
