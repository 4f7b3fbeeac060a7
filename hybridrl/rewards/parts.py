"""The parts of a reward that a configuration turns on, each with its weight. Built in the process that scores."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.config.schema import RewardConfig
from hybridrl.config.user_function import load_function
from hybridrl.rewards.answers import exact_reward, math_reward, reasoning_gym_reward
from hybridrl.rewards.code import make_code_reward
from hybridrl.rewards.function import find_function
from hybridrl.rewards.http import HttpReward
from hybridrl.rewards.request import RewardPart, ScoreRequest
from hybridrl.rewards.result import FailureKind, Score, ScoringFailure


@dataclass(frozen=True, slots=True)
class WeightedPart:
    """One part of a reward."""

    name: str
    weight: float
    part: RewardPart


def part_weights(config: RewardConfig) -> dict[str, float]:
    """Return the weight of every part that scores text, by the key that turns it on; 0 is off."""
    return {
        "reward.function": config.function_weight if config.function is not None else 0.0,
        "reward.exact_weight": config.exact_weight,
        "reward.math_weight": config.math_weight,
        "reward.reasoning_gym_weight": config.reasoning_gym_weight,
        "reward.format.weight": config.format.weight,
        "reward.code.weight": config.code.weight,
        "reward.http.weight": config.http.weight,
    }


def make_parts(config: RewardConfig) -> list[WeightedPart]:
    """Build every part that is on.

    Raises:
        ConfigError: When a function is not there.
        DataError: When the token of a service is not set.
        ImportError: When a function's file cannot be loaded; whatever the file raises passes through.
    """
    parts = []
    if config.function is not None:
        parts.append(WeightedPart("function", config.function_weight, _function(config.function)))
    if config.exact_weight > 0:
        parts.append(WeightedPart("exact", config.exact_weight, exact_reward))
    if config.math_weight > 0:
        parts.append(WeightedPart("math", config.math_weight, math_reward))
    if config.reasoning_gym_weight > 0:
        parts.append(WeightedPart("reasoning_gym", config.reasoning_gym_weight, reasoning_gym_reward))
    if config.format.weight > 0:
        assert config.format.pattern is not None, config.format
        parts.append(WeightedPart("format", config.format.weight, _format(config.format.pattern)))
    if config.code.weight > 0:
        parts.append(WeightedPart("code", config.code.weight, make_code_reward(config.code)))
    if config.http.weight > 0:
        parts.append(WeightedPart("http", config.http.weight, HttpReward(config.http, config.num_processes)))
    return parts


def total(parts: Sequence[WeightedPart], request: ScoreRequest) -> Score:
    """Return the weighted sum of the parts, or the failure of the first part that has no finite number.

    What a part raises passes through, with a note that names the part.
    """
    reward = 0.0
    for each in parts:
        try:
            value: object = each.part(request)
        except BaseException as e:
            e.add_note(f"in the part of the reward called {each.name}")
            raise
        if not isinstance(value, numbers.Real):
            return ScoringFailure(
                FailureKind.WRONG_TYPE, f"{each.name} returned {type(value).__name__}, expected a number"
            )
        if not math.isfinite(value):
            return ScoringFailure(FailureKind.NOT_FINITE, f"{each.name} returned {value}, expected a finite number")
        reward += each.weight * float(value)
    return reward


def _function(reference: str) -> RewardPart:
    function = load_function(find_function(reference))
    return lambda request: function(request.response, request.answer)


def _format(pattern: str) -> RewardPart:
    compiled = re.compile(pattern, re.DOTALL)
    return lambda request: float(compiled.fullmatch(request.final) is not None)
