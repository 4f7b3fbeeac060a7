"""What a parity report says, and when it counts as a failure."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
from rich.console import Console

from hybridrl.parity.activations import Activations, Operator, Site
from hybridrl.parity.compare import LogprobGap, differences, first_over, relative_gap, token_logprobs
from hybridrl.parity.options import ParityOptions
from hybridrl.parity.report import ParityReport, make_report
from hybridrl.parity.table import parity_table

ROWS = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
SITES = [
    Site(Operator.EMBEDDING),
    Site(Operator.INPUT_NORM, 0),
    Site(Operator.LAYER, 0),
    Site(Operator.INPUT_NORM, 1),
    Site(Operator.LAYER, 1),
    Site(Operator.FINAL_NORM),
    Site(Operator.LOGITS),
]
GOOD = LogprobGap("Megatron model, one rank", 1e-6, 1e-6)
LAYOUT = LogprobGap("Megatron engine, tp 2", 1e-6)
VLLM = LogprobGap("vLLM", 1e-6, 1e-6)


def report_of(wrong: dict[Site, np.ndarray], **gaps: LogprobGap) -> ParityReport:
    want = Activations(dict.fromkeys(reversed(SITES), ROWS))
    got = Activations(want.values | wrong)
    chosen = {"one_rank": GOOD, "layout": LAYOUT, "vllm": VLLM} | gaps
    return make_report(ParityOptions(), want, got, **chosen)


def test_operators_are_compared_in_the_order_of_computation() -> None:
    assert [difference.site for difference in report_of({}).operators] == SITES


def test_the_first_operator_over_the_tolerance_is_named_with_its_cause() -> None:
    report = report_of({Site(Operator.LAYER, 1): ROWS * 2, Site(Operator.INPUT_NORM, 1): ROWS * 3, SITES[-1]: ROWS + 1})
    assert not report.is_ok
    assert report.findings() == [
        "first over the tolerance: layer 1, input norm: relative difference 2.0e+00, expected at most 1e-04; what it reads agrees",
        "likely cause: norm epsilon: every token has its own factor, 3 to 3",
        "likely cause: norm weight: every channel has its own factor",
    ]


def test_agreement_is_said_with_its_figures() -> None:
    report = report_of({SITES[0]: ROWS * np.float32(1 + 2e-5)}, vllm=dataclasses.replace(VLLM, logprobs=3e-4))
    assert report.is_ok
    assert report.findings() == ["parity: every operator within 2.0e-05 (relative), log-probs within 3.0e-04"]


@pytest.mark.parametrize("gap", [0.1, float("nan")])
def test_a_layout_alone_at_fault_is_told_from_the_model(gap: float) -> None:
    report = report_of({}, layout=dataclasses.replace(LAYOUT, logprobs=gap))
    assert not report.is_ok
    assert report.findings()[0].startswith(
        f"Megatron engine, tp 2: log-probs differ by {gap:.1e}, expected at most 2e-03"
    )
    assert "the parallel layout" in report.findings()[1]


def test_vllm_alone_at_fault_is_told_from_the_model() -> None:
    report = report_of({}, vllm=dataclasses.replace(VLLM, logprobs=0.1))
    assert not report.is_ok
    assert [line.split(":")[0] for line in report.findings()] == ["vLLM", "likely cause"]
    assert "Megatron agrees" in report.findings()[1]


def test_an_operator_of_another_shape_or_without_numbers_is_over_any_tolerance() -> None:
    want = Activations({SITES[0]: ROWS})
    for wrong in (ROWS[:, :2], ROWS * np.nan, ROWS * np.inf):
        assert first_over(differences(Activations({SITES[0]: wrong}), want), 1e9) is not None


def test_a_reference_of_zeros_does_not_divide_by_zero() -> None:
    zeros = np.zeros_like(ROWS)
    assert relative_gap(zeros, zeros) == 0
    assert relative_gap(ROWS, zeros) > 1e9


def test_log_probs_of_tokens_are_those_of_a_softmax() -> None:
    probabilities = np.exp(ROWS) / np.exp(ROWS).sum(axis=1, keepdims=True)
    got = token_logprobs(ROWS, [5, 1, 7])
    np.testing.assert_allclose(np.exp(got), [probabilities[0, 1], probabilities[1, 7]], rtol=1e-6)


def test_the_table_shows_layers_engines_and_findings() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(parity_table(report_of({Site(Operator.LAYER, 1): ROWS * 2})))
    text = console.export_text()
    rows = {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}
    assert rows["0"] == ["0.0e+00", "0.0e+00"]
    assert rows["1"] == ["0.0e+00", "1.0e+00"]
    assert rows["vLLM"] == ["1.0e-06", "1.0e-06"]
    assert "first over the tolerance: layer 1, layer output" in text
    assert "embedding 0.0e+00; final norm 0.0e+00; logits 0.0e+00" in text
