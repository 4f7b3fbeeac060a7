"""Profilers are switched on for the chosen steps alone, and off when the run has none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from hybridrl.config.choices import ProfileTool
from hybridrl.config.schema import ProfileConfig
from hybridrl.controller.profiles import StepProfiles, profile_launch
from hybridrl.errors import EngineError
from hybridrl.roles.failure import Failure, FailureKind
from tests.unit.controller.fakes import FakeFuture


@dataclass
class FakeProcesses:
    asked: list[int | None] = field(default_factory=list)
    failures: tuple[Failure, ...] = ()

    def begin_profile(self, step: int) -> FakeFuture[None]:
        return FakeFuture(lambda: self.asked.append(step), self.failures)

    def end_profile(self) -> FakeFuture[None]:
        return FakeFuture(lambda: self.asked.append(None), self.failures)


@pytest.mark.parametrize(("tool", "asked"), [(ProfileTool.TORCH, [0, None, 3, None]), (ProfileTool.OFF, [])])
def test_chosen_steps_are_bracketed_and_others_cost_no_call(tool: ProfileTool, asked: list[int | None]) -> None:
    groups = [FakeProcesses(), FakeProcesses()]
    profiles = StepProfiles(ProfileConfig(tool=tool, steps="/3"), groups)
    for step in range(5):
        with profiles.around(step):
            pass
    assert [group.asked for group in groups] == [asked, asked]


def test_a_replica_that_is_dead_when_profiles_begin_or_end_does_not_end_the_run() -> None:
    dead = Failure("rollout", 1, "begin_profile", FailureKind.DIED, "it is gone", is_replaceable=True)
    groups = [FakeProcesses(), FakeProcesses(failures=(dead,))]
    with StepProfiles(ProfileConfig(tool=ProfileTool.TORCH, steps="0"), groups).around(0):
        pass
    assert groups[0].asked == [0, None]
    broken = replace(dead, kind=FailureKind.RAISED, is_replaceable=False)
    with (
        pytest.raises(EngineError, match="rollout rank 1 failed in phase begin_profile"),
        StepProfiles(ProfileConfig(tool=ProfileTool.TORCH, steps="0"), [FakeProcesses(failures=(broken,))]).around(0),
    ):
        pass


def test_processes_learn_what_of_them_is_profiled_and_where_to(tmp_path: Path) -> None:
    assert profile_launch(ProfileConfig(), tmp_path) is None and not list(tmp_path.iterdir())
    launch = profile_launch(ProfileConfig(ProfileTool.TORCH, roles="actor, rollout", ranks="1-2"), tmp_path)
    assert launch is not None and launch.folder == tmp_path / "profiles" and launch.folder.is_dir()
    assert [launch.covers("rollout", rank) for rank in range(4)] == [False, True, True, False]
    assert not launch.covers("critic", 1)
