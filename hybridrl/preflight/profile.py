"""Would the profilers of a run record anything?"""

from __future__ import annotations

import shutil

from hybridrl.config.choices import Platform, ProfileTool
from hybridrl.config.schema import ExperimentConfig
from hybridrl.config.step_list import is_step_list, parse_steps
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.roles import megatron_roles
from hybridrl.preflight.report import Report

_ROLLOUT = "rollout"


def check_profile(report: Report, config: ExperimentConfig) -> None:
    """Check that there are such roles, ranks and steps, and that the tool can trace them."""
    profile = config.profile
    if profile.tool is ProfileTool.OFF:
        return
    if profile.tool is ProfileTool.NSYS:
        _check_nsight(report, config.platform)
    num_ranks = {placed.role.value: parallel_sizes(placed.parallel).world_size for placed in megatron_roles(config)}
    num_ranks[_ROLLOUT] = config.rollout.num_replicas * config.rollout.tp_size
    for role in profile.role_names:
        if role not in num_ranks:
            report.add("profile.roles", role, f"some of the run's roles: {', '.join(num_ranks)}", "correct it")
    asked = {role: num_ranks[role] for role in profile.role_names if role in num_ranks}
    _check_list(report, "profile.steps", profile.steps, config.trainer.num_steps, "steps", "trainer.num_steps")
    for role, number in asked.items():
        _check_list(report, "profile.ranks", profile.ranks, number, f"ranks of the {role}", "profile.roles")


def _check_nsight(report: Report, platform: Platform) -> None:
    if platform is Platform.CPU:
        expected = "off or torch, since platform is cpu: Nsight Systems is told what to record through the CUDA driver"
        report.add("profile.tool", "nsys", expected, "set it to torch", related=("platform",))
    elif shutil.which("nsys") is None:
        expected = "the program nsys on PATH of every node"
        report.add("profile.tool", "nsys", expected, "install Nsight Systems, or set it to torch", is_need=True)


def _check_list(report: Report, key: str, text: str, number: int, what: str, related: str) -> None:
    """Check that a list names at least one of the `number` things from 0 on."""
    if not is_step_list(text):
        report.add(key, text, "a list such as 0,10-12,/50 (0, 10 to 12, every 50th)", "correct it")
    elif not any(index in parse_steps(text) for index in range(number)):
        report.add(key, text, f"some of the {number} {what}, numbered from 0", "correct it", related=(related,))
