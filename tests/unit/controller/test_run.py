"""How a run ends: the last line, and Ctrl-C or SIGTERM with the folder left whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hybridrl.checkpoint.folder import Checkpoint, CheckpointFolder, Found
from hybridrl.checkpoint.manifest import Manifest
from hybridrl.config.schema import ExperimentConfig
from hybridrl.controller.run import (
    Outcome,
    _is_trained,
    _make_checkpoints_folder,
    _recorded,
    _stopped,
    _summary,
    _told_how_to_go_on,
    export_policy,
)
from hybridrl.controller.stopping import StopRequest
from hybridrl.controller.trainer import TrainResult
from hybridrl.errors import ConfigError, EngineError, HangError, RankLostError
from hybridrl.observability.recorder import RunRecorder
from tests.unit.controller.fakes import FakeFuture


def _config(tmp_path: Path) -> ExperimentConfig:
    return ExperimentConfig(name="demo", runs_dir=str(tmp_path))


def test_the_last_line_says_accuracy_before_and_after_and_where_the_report_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = _recorded(_config(tmp_path), 1, "starting", lambda recorder: Outcome(_summary(TrainResult(1, 0.25, 0.953))))
    assert code == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == f"eval/accuracy 0.953 (was 0.250) report: {tmp_path / 'demo' / 'report.html'}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_the_run_once_and_leaves_its_folder_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    cleaned = []

    def run(recorder: RunRecorder) -> Outcome:
        recorder.record_step(0, {"reward/mean": 0.5}, [])
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)  # a second one does not disturb the clean-up
            cleaned.append(True)
        return Outcome("not reached")

    before = signal.getsignal(number)
    assert _recorded(_config(tmp_path), 1, "starting", run) == 130
    assert cleaned == [True]
    assert signal.getsignal(number) is before
    folder = tmp_path / "demo"
    assert (folder / "metrics.jsonl").read_text().count("\n") == 1
    assert (folder / "config.resolved.yaml").is_file() and (folder / "report.html").is_file()
    assert capsys.readouterr().out.strip().splitlines()[-1] == f"interrupted; report: {folder / 'report.html'}"


def test_the_first_sigterm_asks_a_run_with_checkpoints_to_end_after_its_step_and_the_second_ends_it(
    tmp_path: Path,
) -> None:
    stop, seen = StopRequest(on_term=True), []

    def run(recorder: RunRecorder) -> Outcome:
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append(stop.is_made)
        os.kill(os.getpid(), signal.SIGTERM)
        return Outcome("not reached")

    assert _recorded(_config(tmp_path), 1, "starting", run, stop=stop) == 130
    assert seen == [True]


def test_an_error_passes_through_and_the_report_is_written(tmp_path: Path) -> None:
    def run(recorder: RunRecorder) -> Outcome:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        _recorded(_config(tmp_path), 1, "starting", run)
    assert (tmp_path / "demo" / "report.html").is_file()


@pytest.mark.parametrize(
    ("every_steps", "resume", "saved", "code", "words"),
    [
        (5, "auto", [5, 7], 75, "stopped after step 7; the same command goes on from the checkpoint after step 7;"),
        (5, "auto", [5], 75, "stopped after step 7; the same command goes on from the checkpoint after step 5;"),
        (
            5,
            "auto",
            [],
            75,
            "stopped after step 7; the same command goes on from the beginning: it has no checkpoint yet;",
        ),
        (
            5,
            "never",
            [7],
            130,
            "stopped after step 7; go on from the checkpoint after step 7 with trainer.resume={run};",
        ),
        (5, "never", [], 130, "stopped after step 7, before its first checkpoint;"),
        (0, "auto", [], 130, "stopped after step 7 without a checkpoint (checkpoint.every_steps is 0);"),
    ],
)
def test_only_a_run_that_would_go_on_asks_for_the_same_command(
    tmp_path: Path, every_steps: int, resume: str, saved: list[int], code: int, words: str
) -> None:
    config = _config(tmp_path)
    config.checkpoint.every_steps, config.trainer.resume = every_steps, resume
    early = TrainResult(0, None, None, is_stopped=True)
    assert _stopped(config, early, tmp_path) == Outcome("stopped before the first step;", code)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    for step in saved:
        folder.begin(step)
        folder.complete(step, {})
    outcome = _stopped(config, TrainResult(7, None, None, is_stopped=True), tmp_path)
    assert outcome == Outcome(words.format(run=tmp_path), code)


@pytest.mark.parametrize(
    ("every_steps", "resume", "goes_on"), [(5, "auto", True), (5, "never", False), (0, "auto", False)]
)
def test_a_lost_run_says_whether_the_same_command_goes_on(
    tmp_path: Path, every_steps: int, resume: str, goes_on: bool
) -> None:
    config = _config(tmp_path)
    config.checkpoint.every_steps, config.trainer.resume = every_steps, resume
    with pytest.raises(RankLostError) as caught, _told_how_to_go_on(config):
        raise HangError("hang in phase update")
    assert caught.value.can_go_on is goes_on
    advice = "goes on from the newest checkpoint" if goes_on else "would begin anew"
    assert str(caught.value).startswith(f"hang in phase update\nThe same command {advice}")
    with pytest.raises(EngineError, match=r"^own fault$"), _told_how_to_go_on(config):
        raise EngineError("own fault")


def test_a_finished_run_is_not_started_again(tmp_path: Path) -> None:
    """What a chained job finds whose predecessor has trained all steps."""
    config = _config(tmp_path)
    config.trainer.resume, config.trainer.num_steps = "auto", 20
    done = Found((Checkpoint(tmp_path, Manifest(20, {})),), (), ())
    run_dir = Path(config.runs_dir) / config.name
    run_dir.mkdir(parents=True)
    assert not _is_trained(config, done), "its export is missing"
    export_policy(FakeActor("weights"), run_dir / "hf", 20)
    assert _is_trained(config, done)
    config.trainer.num_steps = 21
    assert not _is_trained(config, done)


@pytest.mark.parametrize("record", ["10\n", "", None])
def test_an_export_of_fewer_steps_or_of_an_unknown_number_is_made_anew(tmp_path: Path, record: str | None) -> None:
    """A job that trained the last of the added steps and was killed before it exported."""
    config = _config(tmp_path)
    config.trainer.resume, config.trainer.num_steps = "auto", 20
    hf = Path(config.runs_dir) / config.name / "hf"
    hf.mkdir(parents=True)
    if record is not None:
        (hf / "exported_step").write_text(record)
    done = Found((Checkpoint(tmp_path, Manifest(20, {})),), (), ())
    assert not _is_trained(config, done)
    config.trainer.save_hf_at_end = False
    assert _is_trained(config, done)


def test_a_checkpoint_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    (tmp_path / "file").touch()
    config.checkpoint.folder = str(tmp_path / "file" / "checkpoints")
    _make_checkpoints_folder(config, tmp_path)  # not needed, so not made
    config.checkpoint.every_steps = 1
    with pytest.raises(
        ConfigError, match=r"^checkpoint\.folder: .*/checkpoints cannot be made .*; choose another folder$"
    ):
        _make_checkpoints_folder(config, tmp_path)


class FakeActor:
    """Writes one file, or dies while it does."""

    def __init__(self, text: str) -> None:
        self.text = text

    def save_checkpoint(self, folder: Path) -> FakeFuture[None]:
        folder.mkdir()
        if not self.text:
            raise EngineError("died")
        (folder / "model").write_text(self.text)
        return FakeFuture(lambda: None)


def test_an_export_replaces_the_one_before_only_when_it_is_whole(tmp_path: Path) -> None:
    for step, text in enumerate(("first", "second")):
        export_policy(FakeActor(text), tmp_path / "hf", step)
        assert (tmp_path / "hf" / "model").read_text() == text
    with pytest.raises(EngineError):
        export_policy(FakeActor(""), tmp_path / "hf", 2)
    assert (tmp_path / "hf" / "model").read_text() == "second"
