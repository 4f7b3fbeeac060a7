"""References to users' reward functions, checked without running them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.config.user_function import load_function
from hybridrl.errors import ConfigError
from hybridrl.rewards.function import find_function


def write(folder: Path, text: str) -> Path:
    path = folder / "rewards.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        "response, answer",
        "response, answer, scale=2",
        "*args",
        "response, *rest",
        "a, b, /",
        "a, b, *, c=1",
        "a, b, **kw",
    ],
)
def test_a_function_of_two_arguments_is_found_and_not_run(tmp_path: Path, arguments: str) -> None:
    path = write(tmp_path, f"def score({arguments}):\n    return 1.0\n")
    reference = find_function(f"{path}:score")
    assert str(reference) == f"{path}:score"
    assert load_function(reference)("x", "y") == 1.0


def test_finding_does_not_run_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "raise RuntimeError\ndef score(response, answer): return 1.0\n")
    assert find_function(f"{path}:score").name == "score"


@pytest.mark.parametrize(
    ("text", "reference", "message"),
    [
        ("", "rewards.py", "expected file.py:function, for example rewards.py:score"),
        ("", "rewards.py:", "expected file.py:function, for example rewards.py:score"),
        ("", "rewards:score", "expected file.py:function, for example rewards.py:score"),
        ("", "other.py:score", "other.py is no file; correct the path"),
        ("def score(:", "rewards.py:score", "rewards.py is not Python ("),
        (
            "def points(r, a): ...",
            "rewards.py:score",
            "defines no function 'score' (functions: points); correct the name",
        ),
        ("score = 3", "rewards.py:score", "defines no function 'score' (functions: none); correct the name"),
        ("def score(r): ...", "rewards.py:score", "with arguments (r), expected (response: str, answer: str)"),
        (
            "def score(r, a, b): ...",
            "rewards.py:score",
            "with arguments (r, a, b), expected (response: str, answer: str)",
        ),
        ("def score(r, a, *, b): ...", "rewards.py:score", "expected (response: str, answer: str)"),
    ],
)
def test_a_wrong_reference_is_explained(tmp_path: Path, text: str, reference: str, message: str) -> None:
    write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        find_function(f"{tmp_path}/{reference}")
    assert message in str(caught.value)
