"""Router replay on the real stack: the experts of the sampler, or of the log-prob pass, are those that training uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.controller.run import train
from tests.e2e.runs import demo_config, one_rank, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_training_takes_the_experts_of_the_sampler(tmp_path: Path) -> None:
    overrides = (
        "actor.router_replay=r3",
        "trainer.num_steps=2",
        "trainer.eval_every_steps=1",
        "data.num_eval_prompts=8",
    )
    assert train(demo_config(tmp_path, "r3", *overrides)) == 0
    for row in read_metrics(tmp_path / "r3"):
        assert row["router_replay/hits"] > 0
        assert row["logprob/rollout_vs_old_abs_max"] < 1e-3
        assert row["router_replay/mismatch_without_abs_max"] >= 0


def test_updates_take_the_experts_of_the_log_prob_pass(tmp_path: Path) -> None:
    overrides = one_rank("actor.router_replay=r2", "algorithm.mini_batches_per_step=2", "trainer.num_steps=2")
    assert train(demo_config(tmp_path, "r2", *overrides)) == 0
    rows = read_metrics(tmp_path / "r2")
    assert all(row["router_replay/hits"] > 0 for row in rows)
    # The first mini-batch meets the weights that recorded, the second one weights that an update has moved.
    assert all(0 <= row["router_replay/changed_share"] < 0.5 for row in rows)
