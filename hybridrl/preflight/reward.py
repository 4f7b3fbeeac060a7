"""Can the reward be computed as the configuration says, and is every key of it read?"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from hybridrl.config.schema import ExperimentConfig, RewardConfig
from hybridrl.errors import ConfigError
from hybridrl.preflight.report import Report
from hybridrl.rewards.function import find_function
from hybridrl.rewards.parts import part_weights

_PACKAGES = {"reward.math_weight": "math_verify", "reward.reasoning_gym_weight": "reasoning_gym"}


def check_reward(report: Report, config: ExperimentConfig) -> None:
    """Check the parts of the reward of prompts from files."""
    reward = config.reward
    weights = part_weights(reward)
    if not any(weights.values()) and reward.model.weight == 0:
        expected = "file.py:function or the weight of another part of the reward, since data.task is file"
        report.add("reward.function", "nothing", expected, "write one and name it here", related=("data.task",))
    goal = config.trainer.stop_at_accuracy
    if goal is not None and not any(weights.values()) and reward.model.weight > 0:
        expected = "null, since only reward.model.weight is above 0: a model's score has no mark that counts as right"
        report.add("trainer.stop_at_accuracy", goal, expected, "remove it", related=("reward.model.weight",))
    if reward.function is not None:
        try:
            find_function(reward.function)
        except ConfigError as e:
            report.add_error("reward.function", e)
    _check_parts(report, reward)
    for key, package in _PACKAGES.items():
        if weights[key] > 0 and importlib.util.find_spec(package) is None:
            expected = f"0, since the package {package} is not installed"
            report.add(key, weights[key], expected, "install it, see docs/rewards.md", is_need=True)


def unread_of_reward(reward: RewardConfig) -> Iterator[tuple[str, str]]:
    """Yield keys and sections of the reward that have no effect, and why."""
    for section, weight in (
        ("format", reward.format.weight),
        ("code", reward.code.weight),
        ("http", reward.http.weight),
        ("model", reward.model.weight),
    ):
        if weight == 0:
            yield f"reward.{section}", f"when reward.{section}.weight is 0"
    if reward.function is None:
        yield "reward.function_weight", "when reward.function is null"


def _check_parts(report: Report, reward: RewardConfig) -> None:
    if reward.format.weight > 0:
        key, pattern = "reward.format.pattern", reward.format.pattern
        try:
            re.compile(pattern or "")
        except re.error as e:
            report.add(key, repr(pattern), f"a Python regular expression ({e})", "correct it")
        if pattern is None:
            report.add(key, "nothing", "a pattern, since reward.format.weight is above 0", "set it")
    if reward.code.weight > 0 and reward.code.timeout_s >= reward.sample_timeout_s:
        expected = (
            f"less than reward.sample_timeout_s {reward.sample_timeout_s:g}, or slow programs count as failed scoring"
        )
        related = ("reward.sample_timeout_s",)
        report.add("reward.code.timeout_s", f"{reward.code.timeout_s:g}", expected, "lower it", related=related)
    if reward.model.weight > 0 and reward.model.path is None:
        report.add("reward.model.path", "nothing", "a checkpoint, since reward.model.weight is above 0", "set it")
    if reward.http.weight > 0:
        parts = urlsplit(reward.http.url or "")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            report.add("reward.http.url", reward.http.url, "an address such as http://host:8000/score", "set it")
