import json
from pathlib import Path
from typing import Any

from hybridrl.observability.timeline import Timeline, free_timeline_path


def spans(events: list[dict[str, Any]]) -> list[tuple[str, str, str, int, int]]:
    """Return process, row, name, start and duration of every span, by the names that the events give."""
    named = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    return [
        (named["process_name", e["pid"], 0], named["thread_name", e["pid"], e["tid"]], e["name"], e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    ]


def test_every_span_lies_in_its_process_and_row_in_microseconds(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.add("controller", "phases", "rollout", 1.0, 2.5)
    timeline.add("actor", "rank 0", "update", 2.5, 3.0)
    timeline.add("actor", "rank 1", "update", 2.5, 3.0)
    timeline.add("controller", "phases", "train", 2.5, 3.0)
    timeline.close()
    assert spans(json.loads((tmp_path / "timeline.json").read_text())) == [
        ("controller", "phases", "rollout", 1_000_000, 1_500_000),
        ("actor", "rank 0", "update", 2_500_000, 500_000),
        ("actor", "rank 1", "update", 2_500_000, 500_000),
        ("controller", "phases", "train", 2_500_000, 500_000),
    ]


def test_spans_that_overlap_on_a_row_get_lanes_and_a_lane_is_used_again_when_it_is_free(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    for start, end in ((0.0, 4.0), (1.0, 5.0), (2.0, 6.0), (4.5, 7.0)):
        timeline.add("rollout", "rank 0", "generate", start, end)
    timeline.close()
    rows = [row for _, row, *_ in spans(json.loads((tmp_path / "timeline.json").read_text()))]
    assert rows == ["rank 0", "rank 0, lane 2", "rank 0, lane 3", "rank 0"]


def test_what_was_flushed_lacks_the_end_of_the_array_only(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    for step in range(3):
        timeline.add("controller", "phases", f"step {step}", step, step + 1)
    timeline.flush()
    written = (tmp_path / "timeline.json").read_text()
    assert [name for _, _, name, *_ in spans(json.loads(written + "]"))] == ["step 0", "step 1", "step 2"]
    timeline.close()


def test_a_full_timeline_says_so_and_stops(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json", max_bytes=500)
    for step in range(1000):
        timeline.add("controller", "phases", f"step {step}", step, step + 1)
    timeline.close()
    names = [name for _, _, name, *_ in spans(json.loads((tmp_path / "timeline.json").read_text()))]
    assert names[-1] == "the timeline is full"
    assert 3 < len(names) < 20
    assert (tmp_path / "timeline.json").stat().st_size < 800


def test_a_timeline_without_spans_is_an_empty_array(tmp_path: Path) -> None:
    Timeline(tmp_path / "timeline.json").close()
    assert json.loads((tmp_path / "timeline.json").read_text()) == []


def test_a_run_that_goes_on_in_its_folder_gets_another_file(tmp_path: Path) -> None:
    assert free_timeline_path(tmp_path).name == "timeline.json"
    Timeline(free_timeline_path(tmp_path)).close()
    Timeline(free_timeline_path(tmp_path)).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["timeline-2.json", "timeline.json"]
