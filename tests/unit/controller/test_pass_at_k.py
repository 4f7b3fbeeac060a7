"""pass@k against counting every choice of k samples; majority votes by hand."""

from __future__ import annotations

import itertools

import pytest

from hybridrl.controller.evaluation import ScoredPrompt, sample_metrics
from hybridrl.controller.pass_at_k import ks_up_to, majority_is_correct, pass_at_k


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_pass_at_k_is_the_share_of_choices_with_a_correct_sample(num_samples: int) -> None:
    for num_correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        choices = list(itertools.combinations([True] * num_correct + [False] * (num_samples - num_correct), k))
        expected = sum(any(choice) for choice in choices) / len(choices)
        assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "is_correct", "expected"),
    [
        ("aab", [True, True, False], True),
        ("abb", [True, False, False], False),
        ("ab", [True, False], True),
        ("ab", [False, True], False),
        ("aab", [False, True, False], True),
        ("a", [False], False),
    ],
)
def test_the_majority_is_the_most_frequent_answer_and_the_first_of_equals(
    answers: str, is_correct: list[bool], expected: bool
) -> None:
    assert majority_is_correct(answers, is_correct) is expected


def test_k_goes_up_in_powers_of_two() -> None:
    assert [ks_up_to(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


PROMPTS = [
    ScoredPrompt("gsm8k", ("1", "1", "2", "2"), (1.0, 1.0, 0.0, 0.0)),
    ScoredPrompt("gsm8k", ("3", "4", "4", "4"), (1.0, 0.0, 0.0, 0.0)),
    ScoredPrompt("aime", ("5", "6"), (0.0, 0.2)),
]


def test_metrics_are_given_over_all_prompts_and_by_source() -> None:
    metrics = sample_metrics(PROMPTS, 4)
    assert metrics["mean_at_4"] == pytest.approx((0.5 + 0.25 + 0) / 3)
    assert metrics["gsm8k/majority_at_4"] == 0.5
    assert metrics["gsm8k/pass_at_2"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert metrics["pass_at_2"] == pytest.approx((5 / 6 + 3 / 6 + 0) / 3)
    assert metrics["pass_at_4"] == 1.0  # the third prompt has two scored samples and is left out
    assert "aime/pass_at_4" not in metrics


def test_one_sample_of_one_source_adds_nothing_to_the_accuracy() -> None:
    assert sample_metrics([ScoredPrompt("a", ("1",), (1.0,))], 1) == {}
    two = [ScoredPrompt("a", ("1",), (1.0,)), ScoredPrompt("", ("1",), (0.0,))]
    assert sample_metrics(two, 1) == {"a/mean_at_1": 1.0, "no_source/mean_at_1": 0.0}
