from pathlib import Path

import pytest

from hybridrl.errors import DataError
from hybridrl.observability.run_folder import MetricRows, open_run
from tests.unit.observability.run_folders import write_run


def test_what_the_recorder_wrote_comes_back(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path, num_steps=3, config="trainer:\n  max_policy_lag: 1\n"))
    rows = run.metrics()
    assert run.name == "calc"
    assert run.config() == {"name": "calc", "model.path": "nowhere", "trainer.max_policy_lag": 1}
    assert rows.steps == (0, 1, 2)
    assert rows.series["reward/mean"] == [0.0, 0.1, 0.2]
    assert rows.series["eval/accuracy"] == [0.0, 0.1, None]
    assert list(run.rollout_files()) == [0, 1, 2]
    assert list(run.evaluation_files()) == [0]


def test_a_line_that_a_killed_run_did_not_finish_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path, num_steps=2)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert open_run(path).metrics().steps == (0, 1)


def test_a_damaged_line_is_refused_by_its_place(tmp_path: Path) -> None:
    path = write_run(tmp_path, num_steps=1)
    with (path / "metrics.jsonl").open("a") as file:
        file.write("[1]\n")
    with pytest.raises(DataError, match=r"metrics.jsonl:2: got '\[1\]', expected a JSON object with a step"):
        open_run(path).metrics()


@pytest.mark.parametrize("line", [b"\xff\xfe", b'{"step": 1e400}'])
def test_bytes_that_are_no_text_and_steps_that_are_no_number_are_damage_too(tmp_path: Path, line: bytes) -> None:
    path = write_run(tmp_path, num_steps=1)
    (path / "metrics.jsonl").write_bytes(line + b"\n")
    with pytest.raises(DataError, match=r"metrics.jsonl:1: got .*, expected a JSON object with a step"):
        open_run(path).metrics()


@pytest.mark.parametrize("content", [b"a: [", b"\xff\xfe", b"just text", b""])
def test_a_damaged_configuration_is_refused_by_its_file(tmp_path: Path, content: bytes) -> None:
    path = write_run(tmp_path, num_steps=1)
    (path / "config.resolved.yaml").write_bytes(content)
    with pytest.raises(DataError, match=r"config\.resolved\.yaml: is no YAML with sections, .*; was it damaged"):
        open_run(path).config()


def test_values_that_are_not_finite_are_none(tmp_path: Path) -> None:
    path = write_run(tmp_path, num_steps=1)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "reward/mean": null, "non_finite": {"reward/mean": "nan"}}\n')
    assert open_run(path).metrics().series["reward/mean"] == [0.0, None]


def test_another_folder_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"has no config\.resolved\.yaml and no metrics\.jsonl, expected the folder of a run"
    ):
        open_run(tmp_path)


def test_thinning_keeps_the_last_step_and_every_evaluation() -> None:
    rewards = [0.5 if step == 4 else None for step in range(100)]
    rows = MetricRows(tuple(range(100)), {"eval/reward_mean": rewards, "loss": [float(step) for step in range(100)]})
    thinned = rows.thinned(10)
    assert thinned.steps == (4, *range(9, 100, 10))
    assert thinned.series["loss"] == [float(step) for step in thinned.steps]
