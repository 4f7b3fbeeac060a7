"""Profiles the calls of chosen roles, ranks and steps, in the process that computes them.

    torch   each call becomes a Chrome trace:  <run>/profiles/step_000003/actor_rank_00000_2_update.json.gz
    nsys    the process runs under `nsys profile`, which records while a call is bracketed by the CUDA profiler's start and stop;
            the n-th call is the n-th report  <run>/profiles/<roles>_rank_00000.<n>.nsys-rep  and has an NVTX range that names it

Nothing here imports torch before a call is profiled: workers set their environment first.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.choices import ProfileTool
from hybridrl.config.step_list import StepList

_NSYS = (
    "nsys",
    "profile",
    "--trace=cuda,nvtx,cublas,osrt",
    "--sample=none",
    "--cpuctxsw=none",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=repeat",
    "--force-overwrite=true",
)


@dataclass(frozen=True, slots=True)
class ProfileLaunch:
    """What a process needs to know of the profiles of a run.

    Attributes:
        folder: Gets them; on storage that every node shares, if they are to be together.
        ranks: Of each role.
    """

    tool: ProfileTool
    folder: Path
    roles: tuple[str, ...]
    ranks: StepList

    def covers(self, role: str, rank: int) -> bool:
        """Return whether a rank of a role is profiled in some steps."""
        return role in self.roles and rank in self.ranks

    def python(self, process: str) -> str | None:
        """Return the command that runs Python in a profiled process; None where the process profiles itself.

        Args:
            process: Names its reports.
        """
        if self.tool is not ProfileTool.NSYS:
            return None
        return shlex.join([*_NSYS, f"--output={self.folder / process}", sys.executable])


class Profiler:
    """The profiler of one process; off unless its rank is profiled and a profiled step goes on."""

    def __init__(self, launch: ProfileLaunch | None, rank: int) -> None:
        self._launch = launch
        self._rank = rank
        self._step: int | None = None
        self._num_calls: Counter[str] = Counter()
        self._open = ExitStack()

    def begin(self, step: int) -> None:
        """Profile calls from now on, as those of a step."""
        self._step = step
        self._num_calls.clear()

    def enter(self, role: str, what: str) -> None:
        """Profile as one call, if it is to be, whatever this thread does until :meth:`end`."""
        self._open.enter_context(self.call(role, what))

    def end(self) -> None:
        """Profile no more calls."""
        self._open.close()
        self._step = None

    def call(self, role: str, what: str) -> AbstractContextManager[None]:
        """Profile one call of a role, if it is to be; a call that fails leaves nothing."""
        launch, step = self._launch, self._step
        if launch is None or step is None or not launch.covers(role, self._rank):
            return nullcontext()
        self._num_calls[role] += 1
        file = f"{role}_rank_{self._rank:05d}_{self._num_calls[role]}_{what}"
        return _TOOLS[launch.tool](launch.folder / f"step_{step:06d}" / file)


@contextmanager
def _torch_trace(path: Path) -> Iterator[None]:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as trace, record_function(path.name):
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(f"{path}.json.gz")


@contextmanager
def _cuda_range(path: Path) -> Iterator[None]:
    import torch

    torch.cuda.synchronize()
    with torch.cuda.profiler.profile(), torch.cuda.nvtx.range(f"{path.parent.name} {path.name}"):
        yield
        torch.cuda.synchronize()


_TOOLS: Mapping[ProfileTool, Callable[[Path], AbstractContextManager[None]]] = {
    ProfileTool.TORCH: _torch_trace,
    ProfileTool.NSYS: _cuda_range,
}
