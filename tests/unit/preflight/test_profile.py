"""Profiles that would record nothing, or that a platform cannot make, are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.errors import ConfigError
from hybridrl.preflight.check import load_checked
from hybridrl.preflight.command import Command
from tests.unit.preflight.experiments import write_experiment


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_checked(path, overrides, Command.TRAIN)
    return caught.value.problems


def test_profiles_of_ranks_that_there_are_pass(tmp_path: Path) -> None:
    overrides = ("profile.tool=torch", "profile.roles=actor, rollout", "profile.ranks=0,2", "profile.steps=/50")
    checked = load_checked(write_experiment(tmp_path), overrides, Command.TRAIN)
    assert checked.config.profile.role_names == ("actor", "rollout")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("profile.tool=nsys",),
            "profile.tool: got nsys, expected off or torch, since platform is cpu: Nsight Systems is told what to record through the "
            "CUDA driver; set it to torch",
        ),
        (
            ("profile.tool=torch", "profile.roles=actor,critic"),
            "profile.roles: got critic, expected some of the run's roles: actor, rollout; correct it",
        ),
        (
            ("profile.tool=torch", "profile.ranks=4-9"),
            "profile.ranks: got 4-9, expected some of the 4 ranks of the actor, numbered from 0; correct it",
        ),
        (
            ("profile.tool=torch", "profile.roles=rollout", "profile.ranks=1"),
            "profile.ranks: got 1, expected some of the 1 ranks of the rollout, numbered from 0; correct it",
        ),
        (
            ("profile.tool=torch", "profile.steps=100"),
            "profile.steps: got 100, expected some of the 100 steps, numbered from 0; correct it",
        ),
        (
            ("profile.tool=torch", "profile.steps=first"),
            "profile.steps: got first, expected a list such as 0,10-12,/50 (0, 10 to 12, every 50th); correct it",
        ),
        (
            ("profile.steps=3",),
            "profile.steps: got a value, expected none: it is not read when profile.tool is off; remove it",
        ),
    ],
)
def test_profiles_that_record_nothing_are_refused(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    (problem,) = problems(write_experiment(tmp_path), *overrides)
    assert problem == f"command line: {message}"


def test_nsight_that_is_not_installed_is_a_problem_of_a_run_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs_nsys() -> bool:
        found = problems(write_experiment(tmp_path), "platform=cuda", "placement.rollout=side", "profile.tool=nsys")
        return any("expected the program nsys on PATH of every node" in problem for problem in found)

    monkeypatch.setenv("PATH", str(tmp_path))
    assert needs_nsys()
