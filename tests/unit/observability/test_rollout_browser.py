import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from hybridrl.errors import DataError
from hybridrl.observability.records import RolloutRecord
from hybridrl.observability.rollout_browser import PageLimits, RolloutFile, fitting, run_lengths, write_rollouts_page
from hybridrl.observability.rollout_file import num_tokens_in, read_rollouts
from hybridrl.observability.run_folder import open_run
from tests.unit.observability.pages import ASKS_FOR_SOMETHING, own_text, page_data
from tests.unit.observability.rollouts import make_rollout
from tests.unit.observability.run_folders import write_run

LIMITS = PageLimits()
HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>"


def write(run_dir: Path, limits: PageLimits = LIMITS, steps: range = range(1000)) -> tuple[str, dict]:
    path = run_dir / "rollouts.html"
    note = write_rollouts_page(path, open_run(run_dir), None, steps.__contains__, limits)
    return note, page_data(path)


def test_the_page_has_what_a_sample_was_trained_on(tmp_path: Path) -> None:
    rollout = dataclasses.replace(make_rollout(3), data_source="sums")
    rollout.old_logprobs[4] = -1.5
    note, data = write(write_run(tmp_path, num_steps=1, rollouts=[rollout]))

    assert note == data["note"] == "2 samples of 2 steps and evaluations"
    trained, held_out = data["samples"]
    assert (trained["step"], trained["reward"], trained["source"], trained["finish"]) == (0, 1.0, "sums", "stop")
    assert (trained["spans"], trained["length"], trained["versions"]) == ([2, 4], 4, [3])
    assert [data["tokens"][index] for index in trained["tokens"]] == [[3 + t, f"{3 + t} "] for t in range(6)]
    assert trained["logprobs"] == [-0.5] * 4
    assert trained["differences"] == pytest.approx([-1e-5, -1e-5, -1.0, -1e-5], rel=2e-2)
    assert trained["advantages"] == 1.0
    assert (held_out["held_out"], held_out["differences"], held_out["advantages"]) == (True, None, None)


def test_the_page_loads_nothing_and_no_text_ends_the_script_it_is_in(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, num_steps=1, rollouts=[make_rollout(response=HOSTILE)])
    _, data = write(run_dir)
    assert data["samples"][0]["response"] == HOSTILE
    page = own_text(run_dir / "rollouts.html")
    assert HOSTILE not in page
    assert not ASKS_FOR_SOMETHING.search(page.replace("src=x", ""))


def test_steps_that_are_not_asked_for_stay_away(tmp_path: Path) -> None:
    _, data = write(write_run(tmp_path), steps=range(2, 4))
    assert sorted({sample["step"] for sample in data["samples"]}) == [2, 3]


def test_a_page_without_room_for_all_steps_says_what_it_lacks(tmp_path: Path) -> None:
    note, data = write(write_run(tmp_path), PageLimits(max_tokens=48))
    assert sorted({sample["step"] for sample in data["samples"] if not sample["held_out"]}) == [1, 3, 5]
    assert note == "7 samples of 4 steps and evaluations; 3 of 7 steps and evaluations left out"


def test_a_step_without_room_for_all_samples_is_thinned(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, num_steps=1, rollouts=[make_rollout(index) for index in range(8)])
    note, data = write(run_dir, PageLimits(max_tokens=24), range(1))
    assert [sample["prompt_id"] for sample in data["samples"]][:4] == ["calc:0", "calc:2", "calc:4", "calc:6"]
    assert "4 samples of the shown steps left out" in note


def test_the_middle_of_a_long_sample_is_left_out(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, num_steps=1, rollouts=[make_rollout(num_tokens=20)])
    note, data = write(run_dir, PageLimits(max_sample_tokens=8))
    sample = data["samples"][0]
    assert [data["tokens"][index][0] for index in sample["tokens"]] == [0, 1, 2, 3, 16, 17, 18, 19]
    assert (sample["omitted"], sample["spans"], len(sample["differences"])) == (12, [2, 6], 6)
    assert note.endswith("the middle of 1 long samples left out")


def test_advantages_that_differ_over_tokens_are_all_there_and_nan_is_null(tmp_path: Path) -> None:
    rollout = make_rollout()
    rollout.advantages[2:] = [1.0, -0.5, np.nan, 0.25]
    _, data = write(write_run(tmp_path, num_steps=1, rollouts=[rollout]))
    assert data["samples"][0]["advantages"] == [1.0, -0.5, None, 0.25]


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [("", [0]), ("FFTTTFT", [2, 3, 1, 1]), ("TF", [0, 1, 1]), ("FF", [2]), ("T", [0, 1])],
)
def test_run_lengths_start_with_what_is_masked(mask: str, lengths: list[int]) -> None:
    assert run_lengths(np.array([letter == "T" for letter in mask], dtype=np.bool_)) == lengths


def test_the_last_step_and_version_always_stay() -> None:
    files = [RolloutFile(Path(), number, held_out, 100) for held_out in (False, True) for number in range(5)]
    assert fitting(files, 1000) == files
    assert [(file.number, file.is_held_out) for file in fitting(files, 1)] == [(4, False), (4, True)]


def test_rollouts_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    rollouts = [make_rollout(index, num_tokens=4 + index) for index in range(3)]
    path = write_run(tmp_path, num_steps=1, rollouts=rollouts) / "rollouts" / "step_000000.parquet"
    assert num_tokens_in(path) == 4 + 5 + 6
    for read, written in zip(read_rollouts(path), rollouts, strict=True):
        for field in dataclasses.fields(RolloutRecord):
            got, expected = getattr(read, field.name), getattr(written, field.name)
            same = (
                np.array_equal(got, expected) and got.dtype == expected.dtype
                if isinstance(expected, np.ndarray)
                else got == expected
            )
            assert same, field.name


def test_a_file_without_the_columns_of_today_is_read_and_another_file_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path, num_steps=1) / "rollouts" / "step_000000.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["data_source"]), path)
    assert read_rollouts(path)[0].data_source == ""
    pq.write_table(pq.read_table(path).drop_columns(["loss_mask"]), path)
    with pytest.raises(DataError, match=r"loss_mask.*expected a parquet file of rollouts"):
        read_rollouts(path)
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="expected a parquet file of rollouts"):
        read_rollouts(path)


def test_a_damaged_file_is_named_wherever_the_damage_is(tmp_path: Path) -> None:
    run = write_run(tmp_path, num_steps=1)
    path = run / "rollouts" / "step_000000.parquet"
    whole = path.read_bytes()
    cut, footer, data = whole[: len(whole) // 2], bytearray(whole), bytearray(whole)
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    footer[start : start + 64] = bytes(64)
    data[4 : len(whole) // 4] = bytes(len(whole) // 4 - 4)
    for damaged in (b"", cut, bytes(footer)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"step_000000.parquet: got .*expected a parquet file of rollouts"):
            write(run)
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"step_000000.parquet: got .*expected a parquet file of rollouts"):
        read_rollouts(path)
