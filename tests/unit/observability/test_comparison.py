from pathlib import Path

from hybridrl.observability.comparison import config_differences, write_comparison
from hybridrl.observability.run_folder import open_run
from tests.unit.observability.pages import ASKS_FOR_SOMETHING, own_text, page_data
from tests.unit.observability.run_folders import write_run


def test_the_page_has_curves_differences_and_phases_of_every_run(tmp_path: Path) -> None:
    fast = write_run(tmp_path, "fast", slope=0.2, config="trainer:\n  max_policy_lag: 1\n")
    slow = write_run(tmp_path, "slow", num_steps=3, config="trainer:\n  max_policy_lag: 0\n")
    write_comparison(tmp_path / "out" / "page.html", [open_run(fast), open_run(slow)])

    data = page_data(tmp_path / "out" / "page.html")
    assert [run["name"] for run in data["runs"]] == ["fast", "slow"]
    assert data["differences"] == {"trainer.max_policy_lag": [1, 0]}
    assert data["runs"][1]["series"]["reward/mean"] == [0.0, 0.1, 0.2]
    assert data["runs"][1]["phases"] == {"rollout": 2.0, "step": 3.0}
    assert data["runs"][1]["hours"] == [3 / 3600, 6 / 3600, 9 / 3600]


def test_the_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    write_comparison(tmp_path / "page.html", [open_run(write_run(tmp_path))])
    assert not ASKS_FOR_SOMETHING.search(own_text(tmp_path / "page.html"))


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / folder, num_steps=1) for folder in ("a", "b")]
    write_comparison(tmp_path / "page.html", [open_run(path) for path in paths])
    assert [run["name"] for run in page_data(tmp_path / "page.html")["runs"]] == [str(path) for path in paths]


def test_a_setting_that_one_configuration_lacks_differs_and_the_name_does_not_count() -> None:
    configs = [{"name": "a", "seed": 1, "new": True}, {"name": "b", "seed": 1}]
    assert config_differences(configs) == {"new": [True, None]}
