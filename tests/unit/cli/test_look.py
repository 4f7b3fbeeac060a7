"""The commands for runs: where pages go, what is printed, exit codes, and that nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.cli.main import main
from hybridrl.data.tasks.demo_tokenizer import write_demo_tokenizer
from tests.unit.observability.pages import page_data
from tests.unit.observability.rollouts import make_rollout
from tests.unit.observability.run_folders import write_run

ROOT = Path(__file__).resolve().parents[3]


def test_a_comparison_goes_beside_the_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (write_run(tmp_path / "runs", name, num_steps=1) for name in ("first", "second"))
    capsys.readouterr()
    assert main(["report", str(first), str(second)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'runs' / 'comparison.html'}\n"
    assert len(page_data(tmp_path / "runs" / "comparison.html")["runs"]) == 2


def test_a_page_of_samples_goes_into_the_run_and_shows_ids_where_the_tokenizer_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path, num_steps=2)
    capsys.readouterr()
    assert main(["rollouts", str(run_dir), "--steps", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "nowhere has no tokenizer any more: tokens are shown as ids",
        "2 samples of 1 steps and evaluations",
        str(run_dir / "rollouts.html"),
    ]


def test_a_page_of_samples_shows_what_the_tokenizer_of_the_run_says(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_demo_tokenizer(tmp_path / "model")
    run_dir = write_run(tmp_path, num_steps=1, rollouts=[make_rollout(8)])
    config = run_dir / "config.resolved.yaml"
    config.write_text(config.read_text().replace("nowhere", str(tmp_path / "model")))
    assert main(["rollouts", str(run_dir), "--output", str(tmp_path / "page.html")]) == 0
    texts = [text for _, text in page_data(tmp_path / "page.html")["tokens"]]
    assert all(text and not text.endswith(" ") for text in texts)


@pytest.mark.parametrize("command", ["report", "rollouts"])
def test_another_folder_is_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"hybridrl: {command}: cannot read this"
    assert lines[1].startswith(f"  {tmp_path}: has no config.resolved.yaml")


@pytest.mark.parametrize("command", ["report", "rollouts"])
def test_a_page_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run_dir = write_run(tmp_path, num_steps=1)
    capsys.readouterr()
    assert main([command, str(run_dir), "--output", str(run_dir / "metrics.jsonl" / "page.html")]) == 2
    headline, cause = capsys.readouterr().err.splitlines()
    assert headline.startswith(f"hybridrl: {command}: a file or folder cannot be read or written; correct the path")
    assert "metrics.jsonl" in cause


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "first"], "got 'first', expected steps such as 0,10-12,/50"),
        (["--max-tokens", "0"], "got 0, expected a number >= 1"),
    ],
)
def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["rollouts", "runs/calc", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_looking_at_a_run_imports_neither_ray_nor_torch(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, num_steps=1)
    script = (
        "import sys\nfrom hybridrl.cli.main import main\n"
        "assert main(['report', sys.argv[1]]) == main(['rollouts', sys.argv[1]]) == 0\n"
        "print([name for name in ('torch', 'ray', 'megatron', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
