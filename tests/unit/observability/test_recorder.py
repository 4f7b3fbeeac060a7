import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridrl.observability.progress import PlainProgress
from hybridrl.observability.recorder import RunRecorder
from hybridrl.observability.records import Outcome
from tests.unit.observability.rollouts import make_rollout

ROOT = Path(__file__).parents[3]
KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from hybridrl.observability.recorder import RunRecorder
from tests.unit.observability.rollouts import make_rollout
recorder = RunRecorder(Path(sys.argv[1]), "calc", "name: calc", 10)
for step in range(3):
    recorder.record_step(step, {"reward/mean": step / 10}, [make_rollout()])
os.kill(os.getpid(), signal.SIGKILL)
"""


def open_recorder(tmp_path, **settings) -> RunRecorder:
    return RunRecorder(tmp_path / "runs", "calc", "name: calc\n", 3, progress=PlainProgress(3), **settings)


def rows_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_configuration_metrics_rollouts_tensorboard_and_report(tmp_path):
    with open_recorder(tmp_path) as recorder:
        for step in range(3):
            recorder.record_step(step, {"reward/mean": 0.5}, [make_rollout(0), make_rollout(1)])

    run_dir = tmp_path / "runs" / "calc"
    assert recorder.run_dir == run_dir
    assert {entry.name for entry in run_dir.iterdir()} == {
        "config.resolved.yaml", "metrics.jsonl", "report.html", "rollouts", "tensorboard", "timeline.json",
    }  # fmt: skip
    assert (run_dir / "config.resolved.yaml").read_text() == "name: calc\n"
    assert [row["step"] for row in rows_of(run_dir)] == [0, 1, 2]
    assert sorted(path.name for path in (run_dir / "rollouts").iterdir()) == [
        f"step_{step:06d}.parquet" for step in range(3)
    ]


def test_phase_times_belong_to_the_step_that_they_ran_in(tmp_path):
    with open_recorder(tmp_path) as recorder:
        recorder.start_steps()
        with recorder.phase("rollout"), recorder.phase("train"):
            pass
        recorder.record_step(0, {}, [])
        with recorder.phase("weight_sync"):
            pass
        recorder.record_step(1, {}, [])

    first, second = rows_of(recorder.run_dir)
    assert set(first) == {"step", "time_s/rollout", "time_s/train", "time_s/step"}
    assert set(second) == {"step", "time_s/weight_sync", "time_s/step"}


def test_an_evaluation_joins_the_object_of_the_next_recorded_step(tmp_path):
    with open_recorder(tmp_path) as recorder:
        recorder.record_evaluation(0, {"eval/accuracy": 0.25})
        recorder.record_step(0, {"reward/mean": 0.5}, [])
        recorder.record_step(1, {"reward/mean": 0.6}, [])
        recorder.record_evaluation(3, {"eval/accuracy": 0.75})
        recorder.record_step(2, {"reward/mean": 0.7}, [])

    rows = rows_of(recorder.run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row.get("eval/accuracy") for row in rows] == [0.25, None, 0.75]


def test_held_out_samples_lie_apart_from_those_of_training(tmp_path):
    with open_recorder(tmp_path) as recorder:
        recorder.record_evaluation(0, {"eval/accuracy": 0.25}, [make_rollout()])
        recorder.record_step(0, {"reward/mean": 0.5}, [make_rollout(), make_rollout(1)])

    assert [path.name for path in (recorder.run_dir / "rollouts").iterdir()] == ["step_000000.parquet"]
    assert pq.read_table(recorder.run_dir / "evaluations" / "version_000000.parquet").num_rows == 1


@pytest.mark.parametrize(
    ("error", "outcome"), [(KeyboardInterrupt, Outcome.INTERRUPTED), (RuntimeError, Outcome.FAILED)]
)
def test_a_run_that_is_stopped_leaves_whole_files_that_say_so(tmp_path, error, outcome):
    with pytest.raises(error), open_recorder(tmp_path) as recorder:
        recorder.record_step(0, {"reward/mean": 0.5}, [make_rollout()])
        with recorder.phase("train"):
            raise error

    assert f'"outcome": "{outcome.value}"' in (recorder.run_dir / "report.html").read_text()
    assert [row["step"] for row in rows_of(recorder.run_dir)] == [0]


def test_closing_twice_keeps_the_first_outcome(tmp_path):
    recorder = open_recorder(tmp_path)

    assert recorder.close(Outcome.FAILED) == recorder.close() == recorder.run_dir / "report.html"
    assert '"outcome": "failed"' in recorder.close().read_text()


def test_a_killed_process_leaves_every_finished_step(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED_RUN, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()

    run_dir = tmp_path / "calc"
    assert [row["step"] for row in rows_of(run_dir)] == [0, 1, 2]
    assert (run_dir / "metrics.jsonl").read_text().endswith("}\n")
    assert all(pq.read_table(path).num_rows == 1 for path in (run_dir / "rollouts").iterdir())
    assert '"outcome": "running"' in (run_dir / "report.html").read_text()


def test_the_report_is_rewritten_at_most_once_per_interval(tmp_path):
    with open_recorder(tmp_path, report_interval_s=3600.0) as recorder:
        recorder.record_step(0, {"reward/mean": 0.1}, [])
        written = recorder.run_dir.joinpath("report.html").stat().st_ino
        recorder.record_step(1, {"reward/mean": 0.2}, [])

        assert recorder.run_dir.joinpath("report.html").stat().st_ino == written


def test_a_run_that_goes_on_drops_what_comes_again_and_keeps_the_rest(tmp_path):
    first = open_recorder(tmp_path)
    for step in range(4):
        first.record_evaluation(step, {"eval/accuracy": step / 10}, [make_rollout()])
        first.record_step(step, {"reward/mean": step / 10, "actor/loss": float("nan")}, [make_rollout()])
    first.record_evaluation(4, {"eval/accuracy": 0.4}, [make_rollout()])
    run_dir = tmp_path / "runs" / "calc"
    kept = (run_dir / "metrics.jsonl").read_text().splitlines()[:2]
    # TensorBoard reads files in the order of the seconds in their names; this one is to be of an earlier second.
    (events_file,) = (run_dir / "tensorboard").iterdir()
    events_file.rename(events_file.with_name("events.out.tfevents.0000000000.first"))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "torn')

    with open_recorder(tmp_path, is_continued=True) as recorder:
        assert recorder.run_dir == run_dir
        recorder.resume(2)
        assert (run_dir / "metrics.jsonl").read_text().splitlines() == kept
        recorder.record_step(2, {"reward/mean": 0.9}, [make_rollout()])
    assert [row["step"] for row in rows_of(run_dir)] == [0, 1, 2]
    assert sorted(path.name for path in (run_dir / "rollouts").iterdir()) == [
        f"step_{step:06d}.parquet" for step in range(3)
    ]
    # The evaluation of version 2 belongs to the step before, which stays.
    assert sorted(path.name for path in (run_dir / "evaluations").iterdir()) == [
        f"version_{version:06d}.parquet" for version in range(3)
    ]
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [(event.step, round(event.value, 4)) for event in events.Scalars("reward/mean")] == [
        (0, 0.0), (1, 0.1), (2, 0.9),
    ]  # fmt: skip
    assert '"steps": [0, 1, 2]' in (run_dir / "report.html").read_text()


def test_a_run_that_is_to_go_on_but_never_began_begins(tmp_path):
    with open_recorder(tmp_path, is_continued=True) as recorder:
        recorder.resume(0)
        recorder.record_step(0, {"reward/mean": 0.5}, [])
    assert [row["step"] for row in rows_of(tmp_path / "runs" / "calc")] == [0]
