"""The profiler of one process: what it records, by role, rank and step, and what it costs when it is off."""

from __future__ import annotations

import gzip
import json
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from hybridrl.config.choices import ProfileTool
from hybridrl.config.step_list import parse_steps
from hybridrl.engines.profiler import ProfileLaunch, Profiler


def launch(folder: Path, tool: ProfileTool = ProfileTool.TORCH) -> ProfileLaunch:
    return ProfileLaunch(tool, folder, ("actor", "critic"), parse_steps("1"))


def names(path: Path) -> list[str]:
    with gzip.open(path) as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event["ph"] == "X"]


def test_each_call_of_a_chosen_role_in_a_chosen_step_becomes_a_trace_of_its_own(tmp_path: Path) -> None:
    profiler = Profiler(launch(tmp_path), rank=1)
    with profiler.call("actor", "update"):
        torch.sin(torch.ones(2))
    profiler.begin(3)
    for role, what, function in (
        ("actor", "logprobs", torch.sin),
        ("reference", "logprobs", torch.tan),
        ("actor", "update", torch.cos),
    ):
        with profiler.call(role, what):
            function(torch.ones(2))
    profiler.end()
    with profiler.call("actor", "update"):
        torch.sin(torch.ones(2))
    first, second = sorted(tmp_path.rglob("*"))[1:]
    assert first == tmp_path / "step_000003" / "actor_rank_00001_1_logprobs.json.gz"
    assert second == tmp_path / "step_000003" / "actor_rank_00001_2_update.json.gz"
    assert names(first).count("aten::sin") == 1 and not {"aten::cos", "aten::tan"} & set(names(first))
    assert names(second).count("aten::cos") == 1 and "aten::sin" not in names(second)


def test_whatever_happens_between_enter_and_end_is_one_trace(tmp_path: Path) -> None:
    profiler = Profiler(launch(tmp_path), rank=1)
    profiler.begin(0)
    profiler.enter("actor", "step")
    torch.sin(torch.ones(2))
    profiler.end()
    profiler.end()
    assert "aten::sin" in names(tmp_path / "step_000000" / "actor_rank_00001_1_step.json.gz")


def test_a_call_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    profiler = Profiler(launch(tmp_path), rank=1)
    profiler.begin(0)
    with pytest.raises(KeyError), profiler.call("actor", "update"):
        raise KeyError("broken")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", [0, 2])
def test_other_ranks_and_runs_without_profiles_pay_nothing(tmp_path: Path, rank: int) -> None:
    for profiler in (Profiler(launch(tmp_path), rank), Profiler(None, 1)):
        profiler.begin(0)
        assert isinstance(profiler.call("actor", "update"), nullcontext)


def test_only_nsight_starts_python_in_another_way(tmp_path: Path) -> None:
    assert launch(tmp_path).python("actor_rank_00001") is None
    folder = tmp_path / "a run"
    words = shlex.split(launch(folder, ProfileTool.NSYS).python("actor_rank_00001") or "")
    assert words[:2] == ["nsys", "profile"] and words[-1] == sys.executable
    assert {"--capture-range=cudaProfilerApi", f"--output={folder}/actor_rank_00001"} <= set(words)
