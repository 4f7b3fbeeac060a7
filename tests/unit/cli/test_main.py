"""The command line: exit codes, what is printed, and that nothing heavy is imported before the checks."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.cli.main import Run, main
from hybridrl.config.schema import ExperimentConfig
from hybridrl.errors import DataError, EngineError, HangError, RankLostError
from hybridrl.preflight.command import Command
from tests.unit.preflight.experiments import FILE_TASK, SFT, TRAIN, write_experiment

ROOT = Path(__file__).resolve().parents[3]


def test_check_prints_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(write_experiment(tmp_path))]) == 0
    assert capsys.readouterr().out.startswith("demo: ready for hybridrl train\n")


def test_check_can_be_for_sft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--sft", str(write_experiment(tmp_path, SFT))]) == 0
    assert "demo: ready for hybridrl sft\n" in capsys.readouterr().out


def test_an_export_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "hybridrl: export: cannot read this",
        f"  {tmp_path}/run: there is no such folder; expected a run's folder, a checkpoints folder or one of its step_* folders",
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["check", "train"])
def test_every_problem_is_printed_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = write_experiment(tmp_path)
    assert main([command, str(path), "seed=x", "actor.parallel.pp_size=3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"hybridrl: {path}: 2 problem(s) in the configuration; nothing was started"
    assert lines[1].startswith("  command line: seed: got x")
    assert lines[2].startswith("  command line: actor.parallel.pp_size: got 3")
    assert len(lines) == 3


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_place_with_nothing_to_go_on_from_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = write_experiment(tmp_path)
    assert main([command, str(path), f"trainer.resume={tmp_path}"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"hybridrl: {path}: the checkpoints cannot be used",
        f"  {tmp_path}: has no complete checkpoint; expected a run's folder, a checkpoints folder or one of its step_* folders",
    ]


def test_check_reads_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_experiment(tmp_path, FILE_TASK)
    (tmp_path / "train.jsonl").write_text('{"prompt": ""}\n{\n')
    assert main(["check", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"hybridrl: {path}: the data cannot be used"
    assert lines[1].startswith(f"  {tmp_path}/train.jsonl:1: 'prompt' is empty")
    assert lines[2].startswith(f"  {tmp_path}/train.jsonl:1: no key 'answer'")
    assert lines[3].startswith(f"  {tmp_path}/train.jsonl:2: not valid JSON")


def _that_goes_on(error: RankLostError) -> RankLostError:
    error.can_go_on = True
    return error


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (None, 0, []),
        (EngineError("actor rank 3, train: lost"), 1, ["the run failed (EngineError)", "  actor rank 3, train: lost"]),
        (DataError("reward: 1 of 2\nfix it"), 2, ["the data cannot be used", "  reward: 1 of 2", "  fix it"]),
        (RankLostError("actor rank 3 died"), 1, ["the run failed (RankLostError)", "  actor rank 3 died"]),
        (_that_goes_on(HangError("hang")), 75, ["the run failed (HangError)", "  hang"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
    ],
)
def test_what_ends_a_run_decides_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException | None, code: int, lines: list[str]
) -> None:
    def run(config: ExperimentConfig) -> int:
        if error is not None:
            raise error
        return 0

    path = write_experiment(tmp_path)
    assert main(["train", str(path)], runner=lambda command: run) == code
    printed = capsys.readouterr().err.splitlines()
    assert [line.removeprefix(f"hybridrl: {path}: ") for line in printed] == lines


@pytest.mark.parametrize(("name", "text"), [("train", TRAIN), ("sft", SFT)])
def test_a_command_gets_the_checked_configuration(tmp_path: Path, name: str, text: str) -> None:
    seen: list[tuple[Command, int]] = []

    def runner(command: Command) -> Run:
        def run(config: ExperimentConfig) -> int:
            seen.append((command, config.seed))
            return 0

        return run

    assert main([name, str(write_experiment(tmp_path, text)), "seed=9"], runner) == 0
    assert seen == [(Command(name), 9)]


def test_parity_refuses_a_model_of_no_known_family_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_experiment(tmp_path)
    config = tmp_path / "weights" / "config.json"
    config.write_text(config.read_text().replace('"qwen3_moe"', '"acme"'))
    assert main(["parity", str(path)]) == 2
    printed = capsys.readouterr().err
    assert "acme" in printed
    assert "deepseek_v3" in printed


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["fly", "x.yaml"],
        ["train", "x.yaml", "--fast"],
        ["parity", "x.yaml", "--num-tokens", "1"],
        ["parity", "x.yaml", "--tolerance", "nan"],
    ],
)
def test_wrong_usage_prints_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: hybridrl")


def test_a_refusal_takes_less_than_three_seconds_and_imports_no_engine(tmp_path: Path) -> None:
    path = write_experiment(tmp_path)
    (tmp_path / "weights" / "tokenizer.json").unlink()
    program = (
        "import sys; from hybridrl.cli.main import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'ray', 'vllm', 'megatron', 'transformers'} & set(sys.modules); print(sorted(heavy)); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(path)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU seconds, since wall time says more about what else the machine is doing.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert "tokenizer.json: no such file" in done.stderr
