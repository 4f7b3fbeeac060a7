"""The pages in a real browser: opened from files, without a network, their curves are drawn and their filters work."""

from __future__ import annotations

import dataclasses
import html
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hybridrl.cli.main import main
from hybridrl.observability.records import RolloutRecord
from tests.unit.observability.rollouts import make_rollout
from tests.unit.observability.run_folders import write_run

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (Debian: apt install chromium)")

HOSTILE = "</script><script>document.title = 'broken out'</script><img src=x onerror=\"document.title = 'broken out'\">"


def document(page: Path, state: str, tmp_path: Path) -> str:
    """Return the document that the browser has made of a page, as text."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            "--proxy-server=127.0.0.1:9", "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1300,1000",
            "--virtual-time-budget=5000", "--dump-dom", f"{page.absolute().as_uri()}#{state}",
        ],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


def text_of(document: str, element_id: str) -> str:
    found = re.search(rf'id="{element_id}"[^>]*>(.*?)</', document, re.DOTALL)
    assert found is not None, element_id
    return html.unescape(found[1])


def two_turns(index: int, response: str = "<calc>1+1</calc><res>2</res>2<eos>") -> RolloutRecord:
    """Return a sample of 2 prompt tokens, a turn of 3, an answer of the environment of 2, and a turn of 2."""
    rollout = make_rollout(index, num_tokens=9, response=response)
    rollout.loss_mask[:] = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1], dtype=np.bool_)
    return dataclasses.replace(rollout, num_turns=2, data_source=("sums", "words")[index % 2])


def test_a_comparison_draws_the_curves_of_the_metrics_asked_for(tmp_path: Path) -> None:
    slow = write_run(tmp_path, "slow", config="actor:\n  lr: 0.5\n")
    fast = write_run(tmp_path, "fast", slope=0.2, config="actor:\n  lr: 0.7\n")
    assert main(["report", str(slow), str(fast), "--output", str(tmp_path / "page.html")]) == 0

    seen = document(tmp_path / "page.html", "filter=reward&smoothing=0", tmp_path)
    cards = re.findall(r'<div class="chart" data-metric="([^"]+)"( hidden="")?>(.*?)</svg>', seen, re.DOTALL)
    drawn = [name for name, hidden, body in cards if not hidden and body.count('class="scatterlayer') == 1]
    assert drawn == ["reward/mean"]
    curves = re.search(r'data-metric="reward/mean".*?<g class="scatterlayer mlayer">(.*?)</g></g></g>', seen, re.DOTALL)
    assert curves is not None
    assert curves[1].count('class="js-line"') == 2
    assert 'class="trace bars"' in seen, "the phases are not drawn"
    row = re.search(r"<td[^>]*>actor.lr</td>(.*?)</tr>", seen)
    assert row is not None
    assert re.findall(r">([^<]+)</td>", row[1]) == ["0.5", "0.7"]
    assert re.search(r">Held-out accuracy, last</td><td[^>]*>0.500</td><td[^>]*>1.000</td>", seen)


def test_rollouts_are_filtered_and_the_one_opened_is_coloured_by_its_tokens(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, num_steps=2, rollouts=[two_turns(index) for index in range(4)])
    assert main(["rollouts", str(run_dir)]) == 0
    page = run_dir / "rollouts.html"

    everything = document(page, "", tmp_path)
    assert text_of(everything, "matches") == "9 of 9 samples, mean reward 0.556"
    assert len(re.findall(r'<tr class="pick', everything)) == 9
    assert re.findall(r'<div class="segment (\w+)"><div class="soft">([^<]*)<', everything) == [
        ("prompt", "prompt, 2 tokens"), ("policy", "turn 1, calls a tool, 3 tokens"),
        ("environment", "environment, 2 tokens"), ("policy", "turn 2, 2 tokens"),
    ]  # fmt: skip
    assert len(re.findall(r'<span class="token[^>]*style="background-color: color-mix', everything)) == 5

    state = "step=1&reward_min=0.5&length_max=5&finish=stop&source=words&text=3%2B1&colour=mask"
    filtered = document(page, state, tmp_path)
    assert text_of(filtered, "matches") == "1 of 9 samples, mean reward 1.000"
    assert text_of(filtered, "title") == "calc:3, sample 3"
    assert len(re.findall(r'<tr class="pick opened"', filtered)) == 1


def test_text_of_a_sample_stays_text(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, num_steps=1, rollouts=[two_turns(0, HOSTILE)])
    assert main(["rollouts", str(run_dir)]) == 0

    seen = document(run_dir / "rollouts.html", "", tmp_path)
    assert "<title>calc rollouts | HybridRL</title>" in seen
    assert "<img" not in seen
    assert html.escape(HOSTILE, quote=False) in seen
