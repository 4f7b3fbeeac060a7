"""The shipped recipes, for tests of predictions."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from hybridrl.layout.families import model_spec
from hybridrl.layout.model import ModelSpec
from hybridrl.planning.cluster import Cluster, read_cluster
from hybridrl.planning.run_plan import RunPlan, plan_run
from hybridrl.preflight.check import Checked, load_planned

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
RECIPES = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")


def recipe(name: str, *overrides: str) -> Checked:
    return load_planned(CONFIGS / "recipes" / f"{name}.yaml", overrides)


def cluster(name: str) -> Cluster:
    return read_cluster(CONFIGS / "clusters" / f"{name}.yaml")


def hf_config(name: str) -> dict[str, object]:
    return json.loads((CONFIGS / "models" / name / "config.json").read_text())


def spec(name: str, *, has_mtp: bool = False) -> ModelSpec:
    return model_spec(hf_config(name), has_mtp=has_mtp)


@functools.cache
def planned(name: str, *overrides: str) -> RunPlan:
    checked = recipe(name, *overrides)
    assert checked.config.plan.cluster is not None
    return plan_run(checked.config, checked.spec, read_cluster(Path(checked.config.plan.cluster)))
