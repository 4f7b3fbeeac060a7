"""Rows of prompts as they are stored: JSONL, parquet, and folders of Hugging Face `datasets`.

Rows are counted from 1, as an editor counts lines. A row that cannot be read is handed on as :class:`BadRow`, so that the
faults of a file are listed together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.errors import DataError

EXPECTED_SOURCE = "a .jsonl or .parquet file, a folder written by datasets.save_to_disk, or a .yaml mixture"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read at all."""

    problem: str


Row = Mapping[str, object] | BadRow


def read_rows(path: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file or folder with their numbers.

    Args:
        required: Columns that there must be; ``a.b`` is field b of column a. Checked here where a file has columns.
        optional: Columns that are read when they are there; all others of a columnar file are left on disk.

    Raises:
        DataError: When the file is missing, damaged, of an unknown kind, or lacks a column.
    """
    if path.is_dir():
        return _arrow_rows(path, required, optional)
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected {EXPECTED_SOURCE}")
    if path.suffix == ".jsonl":
        return _jsonl_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path, required, optional)
    raise DataError(f"{path}: suffix {path.suffix!r}, expected .jsonl, .parquet or .yaml; convert or rename the file")


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _parse_line(line)


def _parse_line(line: bytes) -> Row:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        return BadRow(f"not UTF-8 text ({e.reason} at byte {e.start}); save the file as UTF-8")
    except (json.JSONDecodeError, RecursionError) as e:
        return BadRow(f"not valid JSON ({e}), expected one object per line")
    return row if isinstance(row, dict) else BadRow(f"got {shown(row)}, expected a JSON object")


def _parquet_rows(path: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[tuple[int, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        columns = _columns(path, file.schema_arrow.names, required, optional)
        yield from _numbered(lambda: (batch.to_pylist() for batch in file.iter_batches(columns=columns)))
    except (pa.ArrowInvalid, OSError) as e:
        raise DataError(f"{path}: not a readable parquet file ({e}); write it again") from e


def _arrow_rows(folder: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """Read the layout of ``datasets.save_to_disk``: ``state.json`` names Arrow stream files, whose rows follow each other."""
    import pyarrow as pa

    state = _dataset_state(folder)

    def batches() -> Iterator[list[dict[str, object]]]:
        for name in state:
            with pa.memory_map(str(folder / name)) as source:
                reader = pa.ipc.open_stream(source)
                columns = _columns(folder / name, reader.schema.names, required, optional)
                for batch in reader:
                    yield batch.select(columns).to_pylist()

    try:
        yield from _numbered(batches)
    except (pa.ArrowInvalid, OSError) as e:
        raise DataError(f"{folder}: not a readable dataset ({e}); save it again with datasets.save_to_disk") from e


def _dataset_state(folder: Path) -> list[str]:
    """Return the names of a dataset's Arrow files."""
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(child.name for child in folder.iterdir() if child.is_dir())) or "none"
        raise DataError(f"{folder}: holds several splits ({splits}), expected one; name the folder of a split")
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except FileNotFoundError as e:
        raise DataError(f"{folder}: has no state.json, expected a folder written by datasets.save_to_disk") from e
    except (ValueError, KeyError, TypeError) as e:
        raise DataError(f"{path}: not the state of a dataset ({e!r}); save it again with datasets.save_to_disk") from e
    if state.get("_indices_data_files"):
        raise DataError(f"{path}: the dataset is a selection of rows by index; save it again after flatten_indices()")
    return names


def _numbered(batches: Callable[[], Iterator[list[dict[str, object]]]]) -> Iterator[tuple[int, Row]]:
    number = 0
    for batch in batches():
        for row in batch:
            number += 1
            yield number, row


def _columns(path: Path, there: Sequence[str], required: Sequence[str], optional: Sequence[str]) -> list[str]:
    """Return the columns to read, those of nested fields included."""
    wanted = [name if name in there else name.partition(".")[0] for name in required]
    missing = [repr(name) for name in dict.fromkeys(wanted) if name not in there]
    if missing:
        have = ", ".join(map(repr, there))
        raise DataError(f"{path}: no column {', '.join(missing)}, the file has {have}; set data.*_key")
    return list(dict.fromkeys([*wanted, *(name for name in optional if name in there)]))
