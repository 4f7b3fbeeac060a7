"""Prompt files: what is read, and how each kind of fault is named by file and row."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridrl.config.schema import DataConfig
from hybridrl.data.files import read_sources
from hybridrl.data.sample import Prompt
from hybridrl.errors import DataError
from tests.unit.data.tokenizers import demo_tokenizer

GOOD = {"prompt": "1+2=?", "answer": "3"}


def read(path: Path, **settings: object) -> tuple[Prompt, ...]:
    config = DataConfig(**{"max_prompt_tokens": 16, **settings})  # type: ignore[arg-type]
    (source,) = read_sources(config, str(path), demo_tokenizer())
    return source.file.prompts


def write_lines(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def fault(path: Path, **settings: object) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **settings)
    return str(caught.value)


def test_a_line_becomes_a_prompt(tmp_path: Path) -> None:
    path = write_lines(tmp_path, json.dumps(GOOD), "", json.dumps({"prompt": "2+2=?", "answer": 4, "more": [1]}))
    first, second = read(path)
    assert first == Prompt("prompts.jsonl:1", demo_tokenizer().encode_prompt("1+2=?"), "1+2=?", "3", f"{path}:1")
    assert (second.prompt_id, second.answer, second.source) == ("prompts.jsonl:3", "4", f"{path}:3")


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [GOOD, {"prompt": "2+2=?", "answer": "4"}]
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    from_lines = read(write_lines(tmp_path, *map(json.dumps, rows)))
    assert [(p.text, p.answer, p.token_ids) for p in read(path)] == [
        (p.text, p.answer, p.token_ids) for p in from_lines
    ]


def test_ids_can_come_from_a_column(tmp_path: Path) -> None:
    path = write_lines(tmp_path, json.dumps({**GOOD, "id": "a"}), json.dumps({**GOOD, "id": 7}))
    assert [prompt.prompt_id for prompt in read(path, id_key="id")] == ["a", "7"]


def test_an_empty_answer_is_an_answer(tmp_path: Path) -> None:
    assert read(write_lines(tmp_path, json.dumps({**GOOD, "answer": ""})))[0].answer == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1+2=?", ', "not valid JSON (Expecting property name"),
        (
            b'{"prompt": "\xff", "answer": "3"}',
            "not UTF-8 text (invalid start byte at byte 12); save the file as UTF-8",
        ),
        ("[1]", "got [1], expected a JSON object"),
        ("[" * 100_000, "not valid JSON ("),
        ('{"prompt": "", "answer": "3"}', "'prompt' is empty, expected a prompt; fill it in or remove the row"),
        ('{"prompt": " \\n", "answer": "3"}', "'prompt' is empty, expected a prompt"),
        ('{"prompt": 12, "answer": "3"}', "'prompt' is 12, expected text or a list of chat messages"),
        ('{"prompt": null, "answer": "3"}', "'prompt' is null, expected the prompt text"),
        ('{"question": "1", "answer": "3"}', "no key 'prompt' (keys: 'question', 'answer'), expected the prompt text"),
        ('{"prompt": "\\ud800", "answer": "3"}', "'prompt' holds half of a surrogate pair, expected Unicode text"),
        (
            '{"prompt": "1234567890123456", "answer": "3"}',
            "prompt of 17 tokens, expected at most 16 (data.max_prompt_t",
        ),
        ('{"prompt": "1+2=?"}', "no key 'answer' (keys: 'prompt'), expected the answer that the reward compares with"),
        ('{"prompt": "1+2=?", "answer": null}', "'answer' is null, expected the answer"),
        ('{"prompt": "1+2=?", "answer": [3]}', "'answer' is [3], expected text or a number"),
        ('{"prompt": "1+2=?", "answer": true}', "'answer' is True, expected text or a number"),
        ('{"prompt": "1+2=?", "answer": NaN}', "'answer' is nan, expected text or a number"),
    ],
)
def test_a_faulty_line_is_named_by_file_and_row(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = write_lines(tmp_path, json.dumps(GOOD), line, json.dumps(GOOD))
    assert fault(path).startswith(f"{path}:2: {message}")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('"a"', "'id' is 'a' as in row 1, expected a unique id"),
        ("1.5", "'id' is 1.5, expected text or a whole number"),
        ("null", "'id' is null, expected a unique id"),
    ],
)
def test_a_faulty_id_is_named(tmp_path: Path, value: str, message: str) -> None:
    row = '{"prompt": "1", "answer": "1", "id": '
    path = write_lines(tmp_path, f'{row}"a"}}', f"{row}{value}}}")
    assert fault(path, id_key="id") == f"{path}:2: {message}"


def test_all_faults_are_listed_up_to_twenty(tmp_path: Path) -> None:
    path = write_lines(tmp_path, *["{"] * 25)
    lines = fault(path).splitlines()
    assert [line.split(":")[1] for line in lines[:20]] == [str(row) for row in range(1, 21)]
    assert lines[20:] == ["... and 5 more faults"]


def test_a_file_without_rows_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path, "")
    assert fault(path) == f"{path}: no rows; expected at least one prompt"


def test_a_file_that_is_not_there_or_of_another_kind_is_an_error(tmp_path: Path) -> None:
    assert fault(tmp_path / "x.jsonl").startswith(
        f"{tmp_path}/x.jsonl: no such file; expected a .jsonl or .parquet file, a"
    )
    (tmp_path / "x.csv").touch()
    assert fault(tmp_path / "x.csv") == (
        f"{tmp_path}/x.csv: suffix '.csv', expected .jsonl, .parquet or .yaml; convert or rename the file"
    )


def test_a_parquet_file_without_the_columns_or_damaged_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"question": ["1"], "answer": ["1"]}), path)
    assert fault(path) == f"{path}: no column 'prompt', the file has 'question', 'answer'; set data.*_key"
    path.write_bytes(path.read_bytes()[:-4])
    assert fault(path).startswith(f"{path}: not a readable parquet file (")


def test_faulty_parquet_rows_are_named_by_row(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": ["1", None, ""], "answer": ["1", "1", "1"]}), path)
    assert fault(path).splitlines() == [
        f"{path}:2: 'prompt' is null, expected the prompt text",
        f"{path}:3: 'prompt' is empty, expected a prompt; fill it in or remove the row",
    ]
