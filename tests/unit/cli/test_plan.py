"""hybridrl plan: every problem at once, tables or JSON, and for what does not fit its place and what to change."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from hybridrl.cli.main import main
from tests.unit.planning.recipes import CONFIGS, RECIPES

SMALL = CONFIGS / "recipes" / "qwen3-30b-a3b.yaml"
H100 = f"plan.cluster={CONFIGS / 'clusters' / 'h100.yaml'}"


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> dict[str, object]:
    assert main(["plan", *arguments, "--json"]) == exit_code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_and_lacks_only_files_and_the_hardware(name, capsys):
    plan = plan_json(capsys, str(CONFIGS / "recipes" / f"{name}.yaml"))
    assert plan["verdict"] == "fits" and plan["shortfall"] is None
    assert plan["num_devices"] == {"qwen3-30b-a3b": 16, "qwen3-235b-a22b": 128, "deepseek-v3": 512}[name]
    assert [re.search(r":\d+: ([a-z_.]+): got", need)[1] for need in plan["needs"]] == [
        "platform",
        "model.path",
        "model.path",
        "data.train_path",
    ]


def test_tables_show_stages_phases_the_sync_and_the_step(capsys):
    assert main(["plan", str(SMALL)]) == 0
    out = capsys.readouterr().out
    for part in (
        "30,532,122,624 parameters",
        "16 on 2 node(s): 8 in train (actor), 8 in rollout (rollout)",
        "64 prompts x 16 = 1024 samples",
        "rollout worker",
        "Weight sync (nccl)",
        "244.36 GB",
        "max_policy_lag 1",
        "verdict: fits",
        "training on GPUs is not supported yet",
    ):
        assert part in out, part


def test_every_problem_is_listed_before_anything_is_planned(capsys):
    overrides = ("actor.parallel.tp_size=3", "rollout.max_model_tokens=100", "plan.num_nodes=1", "rolout.tp_size=2")
    assert main(["plan", str(SMALL), *overrides]) == 2
    error = capsys.readouterr().err
    for part in (
        "rolout.tp_size: unknown key",
        "actor.parallel.tp_size: got 3, expected a divisor",
        "rollout.max_model_tokens: got 100",
        "plan.num_nodes: got 1, expected at least 3 nodes of 8 devices for the run's 20",
    ):
        assert part in error, part


def test_a_plan_without_a_cluster_says_how_to_name_one(capsys):
    assert main(["plan", str(SMALL), "plan.cluster=null"]) == 2
    assert (
        "plan.cluster: got null, expected a cluster file; set it, e.g. to configs/clusters/h100.yaml"
        in capsys.readouterr().err
    )


def test_what_does_not_fit_is_named_with_a_change_that_does(capsys):
    plan = plan_json(capsys, str(SMALL), H100, exit_code=1)
    shortfall = str(plan["shortfall"])
    assert shortfall.startswith(
        "train, stage 0, update: needs 86.03 GiB of 79.1 GiB; the largest part is optimizer, 42.67 GiB\n"
    )
    page = (CONFIGS.parent / "docs" / "planning.md").read_text()
    assert all(line in page for line in shortfall.splitlines())
    first = shortfall.splitlines()[1]
    settings, verdict = re.fullmatch(
        r"  try (.*): [\d.]+ GiB on the fullest of \d+ devices, (fits|tight)", first
    ).groups()
    assert plan_json(capsys, str(SMALL), H100, *settings.split(), "plan.num_nodes=3")["verdict"] == verdict


@pytest.mark.parametrize(
    ("overrides", "problem", "change"),
    [
        # Long micro-batches without recomputation: activations.
        (
            ("actor.recompute=none", "actor.micro_batch.tokens=36864"),
            r"train, stage 0, update: needs .* the largest part is activations",
            "try actor.recompute=full",
        ),
        # A long micro-batch on one tensor-parallel rank: logits.
        (
            ("actor.micro_batch.tokens=73728", "actor.parallel.tp_size=1", "actor.parallel.dp_size=8"),
            r"train, stage 0, (update|log-probs): needs .* the largest part is logits",
            "try actor.micro_batch.tokens=9216",
        ),
        # Weights that leave no room for a sample.
        (
            ("rollout.gpu_memory_fraction=0.23",),
            r"rollout, rollout worker, rollout: the KV cache holds \d+ tokens, fewer than one sample of 9216",
            "try rollout.tp_size=4 rollout.num_replicas=2",
        ),
        # Both roles on the same devices.
        (
            ("placement.rollout=train", "rollout.num_replicas=8", "rollout.tp_size=1"),
            r"train, stage 0, update: needs .* the largest part is KV cache",
            "try rollout.tp_size=2 rollout.num_replicas=4 rollout.gpu_memory_fraction=0.33",
        ),
    ],
)
def test_each_kind_of_shortage_is_told_apart(overrides, problem, change, capsys):
    shortfall = str(plan_json(capsys, str(SMALL), *overrides, exit_code=1)["shortfall"])
    assert re.match(problem, shortfall), shortfall
    assert change in shortfall, shortfall


def test_planning_imports_no_engine():
    code = (
        "import sys; from hybridrl.cli.main import main; "
        f"assert main(['plan', {str(SMALL)!r}, '--json']) == 0; "
        "print([name for name in ('torch', 'ray', 'megatron', 'vllm', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr.strip() == "[]"
