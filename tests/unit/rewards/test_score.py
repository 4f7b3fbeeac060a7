"""Scoring with users' functions: every way to fail, dropped and counted or fatal, in bounded time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridrl.config.choices import RewardFailure, TaskName
from hybridrl.config.schema import RewardConfig
from hybridrl.errors import DataError
from hybridrl.rewards.result import FailureKind
from hybridrl.rewards.score import Scorer, make_scorer
from tests.unit.rewards.samples import sample

FUNCTION = """
import os, sys, time
print("loading")
def score(response, answer):
    print("scoring", response)
    match response:
        case "raise": raise ValueError("no such unit")
        case "nan": return float("nan")
        case "inf": return -float("inf")
        case "text": return "1"
        case "none": return None
        case "hang": time.sleep(60)
        case "exit": sys.exit(3)
        case "die": os._exit(4)
    return response == answer
"""
FAILURES = {
    "raise": FailureKind.EXCEPTION,
    "nan": FailureKind.NOT_FINITE,
    "inf": FailureKind.NOT_FINITE,
    "text": FailureKind.WRONG_TYPE,
    "none": FailureKind.WRONG_TYPE,
    "hang": FailureKind.TIMEOUT,
    "exit": FailureKind.CRASH,
    "die": FailureKind.CRASH,
}


@contextmanager
def scorer(folder: Path, text: str = FUNCTION, **settings: object) -> Iterator[Scorer]:
    path = folder / "rewards.py"
    path.write_text(text)
    config = RewardConfig(function=f"{path}:score", sample_timeout_s=1.0, timeout_s=20.0)
    for name, value in settings.items():
        setattr(config, name, value)
    made = make_scorer(config, TaskName.FILE)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("num_processes", [1, 3])
def test_failed_samples_are_dropped_and_counted_and_the_others_scored(tmp_path: Path, num_processes: int) -> None:
    texts = ["a", *FAILURES, "b", "a"]
    samples = [sample(text, index=index) for index, text in enumerate(texts)]
    with scorer(tmp_path, on_error=RewardFailure.DROP, num_processes=num_processes) as made:
        for _ in range(2):
            result = made.score(samples)
            assert result.is_scored.tolist() == [text not in FAILURES for text in texts]
            assert result.rewards.tolist() == [float(text == "a") for text in texts]
            assert result.num_failures == {kind: list(FAILURES.values()).count(kind) for kind in FailureKind}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", "exception: Traceback (most recent call last):"),
        ("raise", "ValueError: no such unit"),
        ("nan", "not_finite: function returned nan, expected a finite number"),
        ("text", "wrong_type: function returned str, expected a number"),
        ("hang", "timeout: no reward within reward.sample_timeout_s = 1 s; it was in `"),
        ("hang", "/rewards.py:"),
        ("die", "crash: the scoring process ended with exit code 4"),
    ],
)
def test_a_failure_that_is_fatal_names_the_sample(tmp_path: Path, text: str, message: str) -> None:
    with scorer(tmp_path) as made, pytest.raises(DataError) as caught:
        made.score([sample("a", index=0), sample(text, index=1)])
    start = "reward: 1 of 2 samples could not be scored; first sample 1 of prompt p1 (prompts.jsonl:1): "
    assert str(caught.value).startswith(start)
    assert message in str(caught.value)


def test_the_time_of_a_step_is_bounded(tmp_path: Path) -> None:
    with scorer(tmp_path, on_error=RewardFailure.DROP, timeout_s=2.0, sample_timeout_s=10.0) as made:
        started = time.monotonic()
        result = made.score([sample("a"), sample("hang"), sample("a")])
        assert time.monotonic() - started < 4.0
        assert result.is_scored.tolist() == [True, False, False]
        assert result.num_failures[FailureKind.TIMEOUT] == 2
        assert made.score([sample("a")]).is_scored.all()


def test_numbers_of_any_kind_are_rewards(tmp_path: Path) -> None:
    text = "import numpy as np\nfrom fractions import Fraction\nV = [1, True, np.float32(.5), np.int64(2), Fraction(1, 4)]\n"
    text += "def score(response, answer): return V[int(response)]\n"
    with scorer(tmp_path, text) as made:
        assert made.score([sample(str(i)) for i in range(5)]).rewards.tolist() == [1.0, 1.0, 0.5, 2.0, 0.25]


def test_text_arrives_as_it_was(tmp_path: Path) -> None:
    text = "def score(response, answer): return response == 'é\\n\"\\\\\\x00😀' and answer == 'a\\nb'\n"
    with scorer(tmp_path, text) as made:
        assert made.score([sample('é\n"\\\x00😀', "a\nb")]).rewards.tolist() == [1.0]


def test_no_samples_are_no_rewards(tmp_path: Path) -> None:
    with scorer(tmp_path) as made:
        assert made.score([]).rewards.tolist() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_that_name\ndef score(r, a): return 1", "could not be loaded: Traceback"),
        (
            "import sys\nsys.exit(5)\ndef score(r, a): return 1",
            "could not be loaded: the scoring process ended with exit code 5",
        ),
        ("while True: pass\ndef score(r, a): return 1", "did not load within reward.timeout_s = 1 s; raise it"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_an_error_at_the_start(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught, scorer(tmp_path, text, timeout_s=1.0 if "while" in text else 20.0):
        pass
    assert str(caught.value).startswith(f"reward.function: {tmp_path}/rewards.py {message}")


def test_generated_tasks_bring_their_own_reward() -> None:
    made = make_scorer(RewardConfig(), TaskName.REVERSE)
    result = made.score([sample("cba<eos>", "cba"), sample("abc<eos>", "cba")])
    made.close()
    assert result.rewards.tolist() == [1.0, 0.0]
    assert result.is_scored.all()
