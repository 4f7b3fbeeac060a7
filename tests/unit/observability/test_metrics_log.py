import json
import math

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridrl.observability.metrics_log import MetricsLog, metrics_line


def test_a_line_is_strict_json_with_the_step_first():
    row = json.loads(metrics_line(7, {"reward/mean": 0.5, "policy_version": 7, "weight_sync/verified": True}))

    assert list(row) == ["step", "reward/mean", "policy_version", "weight_sync/verified"]
    assert row["weight_sync/verified"] is True


def test_values_without_a_json_number_become_null_and_are_named():
    metrics = {"actor/loss": math.nan, "actor/grad_norm": math.inf, "actor/entropy": -math.inf, "reward/mean": 1.0}

    row = json.loads(metrics_line(0, metrics), parse_constant=refuse)

    assert row["actor/loss"] is row["actor/grad_norm"] is row["actor/entropy"] is None
    assert row["non_finite"] == {"actor/loss": "nan", "actor/grad_norm": "inf", "actor/entropy": "-inf"}
    assert row["reward/mean"] == 1.0


def refuse(text):
    raise AssertionError(f"{text} is not JSON")


def test_numpy_scalars_are_written_as_numbers():
    row = json.loads(metrics_line(0, {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}))

    assert row == {"step": 0, "a": 0.5, "b": 3, "c": True}


def test_tensorboard_reads_the_same_numbers(tmp_path):
    log = MetricsLog(tmp_path)
    log.append(0, {"reward/mean": 0.25})
    log.append(1, {"reward/mean": 0.75})
    log.close()

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/mean")

    assert [(event.step, event.value) for event in events] == [(0, 0.25), (1, 0.75)]
