"""Switches the profilers of a run's processes on for chosen steps; see :mod:`hybridrl.engines.profiler`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hybridrl.config.choices import ProfileTool
from hybridrl.config.schema import ProfileConfig
from hybridrl.config.step_list import StepList, parse_steps
from hybridrl.controller.interfaces import ProfiledGroup
from hybridrl.engines.profiler import ProfileLaunch
from hybridrl.roles.failure import ReplaceableRankLostError
from hybridrl.roles.future import Future, wait_all

_FOLDER = "profiles"


def profile_launch(config: ProfileConfig, run_dir: Path) -> ProfileLaunch | None:
    """Return what processes need to profile themselves; None when profiling is off."""
    if config.tool is ProfileTool.OFF:
        return None
    folder = (run_dir / _FOLDER).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return ProfileLaunch(config.tool, folder, config.role_names, parse_steps(config.ranks))


class StepProfiles:
    """The profiled steps of a run.

    Args:
        groups: Their processes, some of which are profiled; a rollout that runs ahead is profiled as part of the step that goes on.
    """

    def __init__(self, config: ProfileConfig, groups: Sequence[ProfiledGroup]) -> None:
        self._groups = groups
        self._steps = StepList((), ()) if config.tool is ProfileTool.OFF else parse_steps(config.steps)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Profile a step if it is chosen.

        Raises:
            EngineError: A process failed.
        """
        if step not in self._steps:
            yield
            return
        _wait([group.begin_profile(step) for group in self._groups])
        yield
        _wait([group.end_profile() for group in self._groups])


def _wait(futures: Sequence[Future[None]]) -> None:
    """Wait for all; a replica that died lacks its profile, and the next rollout or weight sync makes it good."""
    with suppress(ReplaceableRankLostError):
        wait_all(futures)
