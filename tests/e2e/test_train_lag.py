"""Rollouts one step ahead, two replicas, pools of their own, gloo: the same loop and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.controller.run import train
from tests.e2e.runs import demo_config, one_rank, planned_wire_bytes, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_with_max_policy_lag_1_samples_are_one_version_old_and_never_two(tmp_path: Path) -> None:
    overrides = one_rank(
        "trainer.max_policy_lag=1",
        "rollout.num_replicas=2",
        "placement.rollout=rollout",
        "weight_sync.transport=gloo",
        "trainer.num_steps=4",
    )
    config = demo_config(tmp_path, "lag", *overrides)
    assert train(config) == 0
    rows = read_metrics(tmp_path / "lag")
    assert [row["lag/max"] for row in rows] == [0, 1, 1, 1]
    assert [row["lag/mean"] for row in rows] == [0, 1, 1, 1]
    for row in rows:
        assert row["weight_sync/verified"] is True
        assert row["weight_sync/wire_bytes"] == row["weight_sync/lower_bound_bytes"] == planned_wire_bytes(config)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"]
