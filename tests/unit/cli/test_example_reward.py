"""The example's reward function, as the scorer runs it."""

from __future__ import annotations

from pathlib import Path

from hybridrl.config.choices import TaskName
from hybridrl.config.schema import RewardConfig
from hybridrl.rewards.score import make_scorer
from tests.unit.rewards.samples import sample

FILE = Path(__file__).resolve().parents[3] / "configs" / "examples" / "arithmetic_reward.py"


def test_the_last_number_counts() -> None:
    scorer = make_scorer(RewardConfig(function=f"{FILE}:score"), TaskName.FILE)
    texts = ["3 + 4 is 7<eos>", "It is 7, no, 8", "-7", "none"]
    rewards = scorer.score([sample(text, "7") for text in texts]).rewards
    scorer.close()
    assert [round(float(reward), 1) for reward in rewards] == [1.0, 0.1, 0.1, 0.0]
