import json
import math
import re

from hybridrl.observability.records import Outcome
from hybridrl.observability.report import Report
from tests.unit.observability.rollouts import make_rollout


def read(report: Report) -> tuple[str, dict]:
    page = report.path.read_text(encoding="utf-8")
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    return page, json.loads(data[1])


def make_report(tmp_path, num_steps: int = 3) -> Report:
    return Report(tmp_path / "report.html", "calc", num_steps, "name: calc\n")


def test_the_page_loads_nothing_from_anywhere(tmp_path):
    report = make_report(tmp_path)
    report.write(Outcome.FINISHED)

    page, _ = read(report)
    plotly = re.search(r"<script>(/\*\*\s*\* plotly.*?)</script>", page, re.DOTALL)
    own = page.replace(plotly[1], "")
    assert len(plotly[1]) > 1_000_000, "the Plotly library is not inlined"
    assert not re.search(r"https?:|//cdn|<link|@import|\bsrc=|url\(|fetch\(|import\(", own)


def test_the_page_has_every_metric_and_null_where_there_is_no_number(tmp_path):
    report = make_report(tmp_path)
    report.add_metrics(0, {"reward/mean": 0.25, "weight_sync/verified": True})
    report.add_metrics(1, {"reward/mean": math.nan, "eval/accuracy": 0.5})
    report.write(Outcome.RUNNING)

    _, data = read(report)
    assert data["outcome"] == "running"
    assert data["steps"] == [0, 1]
    assert data["series"] == {
        "eval/accuracy": [None, 0.5],
        "reward/mean": [0.25, None],
        "weight_sync/verified": [1.0, None],
    }


def test_text_of_a_rollout_cannot_end_the_script_it_is_in(tmp_path):
    report = make_report(tmp_path)
    hostile = "</script><script>alert(1)</script><!--"
    report.add_rollouts(0, [make_rollout(response=hostile)])
    report.write(Outcome.FINISHED)

    page, data = read(report)
    assert hostile not in page
    assert data["samples"]["0"][0]["response"] == hostile


def test_a_very_long_response_is_shortened_and_says_so(tmp_path):
    report = make_report(tmp_path)
    report.add_rollouts(0, [make_rollout(response="x" * 5000)])
    report.write(Outcome.FINISHED)

    _, data = read(report)
    assert data["samples"]["0"][0]["response"].endswith("(1000 more characters in the parquet file)")


def test_samples_show_prompts_spread_over_the_step(tmp_path):
    report = make_report(tmp_path)
    report.add_rollouts(0, [make_rollout(index) for index in range(32)])
    report.write(Outcome.FINISHED)

    _, data = read(report)
    assert [row["prompt"] for row in data["samples"]["0"]] == [f"{index}+1=?" for index in range(0, 32, 4)]


def test_the_worst_tokens_are_shown_in_context_and_prompt_tokens_are_not_among_them(tmp_path):
    rollout = make_rollout(num_tokens=6, num_prompt_tokens=2)
    rollout.old_logprobs[:] = [9, 9, -0.5, -0.9, -0.5, -0.6]
    report = Report(tmp_path / "report.html", "calc", 1, "", decode=lambda ids: " ".join(f"t{token}" for token in ids))
    report.add_rollouts(0, [rollout, make_rollout(1)])
    report.write(Outcome.FINISHED)

    _, data = read(report)
    worst = data["worst"]["0"]
    assert [round(token["gap"], 3) for token in worst][:2] == [0.4, 0.1]
    assert (worst[0]["before"], worst[0]["token"], worst[0]["after"]) == ("t0 t1 t2", "t3", "t4 t5")
    assert worst[0]["where"] == "calc:0 sample 0, token 3 of 6"


def test_a_long_run_keeps_the_page_small_with_first_and_last_step(tmp_path):
    report = make_report(tmp_path, num_steps=10_000)
    for step in range(10_000):
        report.add_metrics(step, {"reward/mean": step / 10_000})
        report.add_rollouts(step, [make_rollout()])
    report.write(Outcome.FINISHED)

    _, data = read(report)
    sampled = sorted(map(int, data["samples"]))
    assert len(data["steps"]) <= 2001
    assert data["steps"][-1] == 9_999
    assert len(sampled) <= 33
    assert (sampled[0], sampled[-1]) == (0, 9_999)
