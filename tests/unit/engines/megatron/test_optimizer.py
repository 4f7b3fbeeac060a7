"""The learning rate of each step."""

from __future__ import annotations

import pytest

from hybridrl.config.choices import LrSchedule
from hybridrl.config.schema import OptimizerConfig
from hybridrl.engines.megatron.optimizer import Optimizer, learning_rate
from hybridrl.errors import EngineError


def rates(schedule: LrSchedule, num_steps: int, **fields) -> list[float]:
    config = OptimizerConfig(lr=1.0, schedule=schedule, **fields)
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


def test_warm_up_is_linear_and_never_zero():
    assert rates(LrSchedule.CONSTANT, 5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_constant_ignores_the_minimum():
    assert rates(LrSchedule.CONSTANT, 3, min_lr=0.1) == [1.0, 1.0, 1.0]


def test_linear_ends_at_the_minimum_in_the_last_step():
    assert rates(LrSchedule.LINEAR, 5, min_lr=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_in_the_middle():
    assert rates(LrSchedule.COSINE, 5, warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


def test_steps_beyond_the_last_keep_the_minimum():
    config = OptimizerConfig(lr=1.0, min_lr=0.3, schedule=LrSchedule.COSINE)
    assert learning_rate(config, 50, 10) == pytest.approx(0.3)


def test_a_decay_without_an_end_is_refused():
    config = OptimizerConfig(schedule=LrSchedule.LINEAR, warmup_steps=3)
    with pytest.raises(EngineError, match=r"optimizer\.schedule linear needs more steps than warmup_steps 3, got 0"):
        Optimizer([], config, None, None, num_steps=0)
