"""Rewards of the generated tasks."""

from __future__ import annotations

import pytest

from hybridrl.rewards.tasks import calc_reward, exact_reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<calc>12+34-56</calc><res>-10</res>-10<eos>", 1.0),
        ("<calc>46-56</calc><res>-10</res>-10<eos>", 1.0),
        ("-10<eos>", 0.0),
        ("<calc>12+34-56</calc><res>-10</res>-10", 0.0),
        ("<calc>12+34-56</calc><res>-10</res>-1<eos>", 0.0),
        ("<calc>12+34-56</calc><res>-10</res> -10<eos>", 0.0),
        ("<calc>12+34-56</calc><res>-10</res><eos>", 0.0),
        ("<calc>12+34-56</calc>", 0.0),
        ("<res>-10</res>-10<eos>", 0.0),
        ("", 0.0),
    ],
)
def test_calc_pays_for_a_call_and_the_exact_answer(response: str, reward: float) -> None:
    assert calc_reward(response, "-10") == reward


@pytest.mark.parametrize(("response", "reward"), [("cba<eos>", 1.0), ("cba", 0.0), ("cbaa<eos>", 0.0), ("<eos>", 0.0)])
def test_reverse_pays_for_the_exact_answer_that_ends(response: str, reward: float) -> None:
    assert exact_reward(response, "cba") == reward
