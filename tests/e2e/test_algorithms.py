"""Each preset trains two steps on the real stack. The demo's own GRPO is in test_train_calc.py, PPO with a critic in test_placement.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybridrl.controller.run import train
from tests.e2e.runs import CALC, demo_config, one_rank, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PRESETS = CALC.parents[1] / "algorithms"


@pytest.mark.parametrize("preset", ["dapo", "gspo", "reinforce_pp", "remax", "rloo"])
def test_a_preset_trains(preset: str, tmp_path: Path) -> None:
    config = tmp_path / "experiment.yaml"
    config.write_text(f"include: [{CALC.parent / 'reverse.yaml'}, {PRESETS / preset}.yaml]\n")
    overrides = one_rank("trainer.num_steps=2", "actor.optimizer.warmup_steps=0")
    assert train(demo_config(tmp_path, "run", *overrides, path=config)) == 0
    first, second = read_metrics(tmp_path / "run")
    for row in (first, second):
        assert row["actor/grad_norm"] > 0 and np.isfinite(row["actor/loss"])
        assert row["weight_sync/verified"] is True
    assert second["actor/entropy"] != first["actor/entropy"]
    assert second["reward/mean"] > 0
