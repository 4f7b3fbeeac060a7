"""Prompts from JSONL and parquet files. Every row is checked before anything starts; faults are listed together.

Rows are counted from 1, as an editor counts lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hybridrl.data.sample import Prompt
from hybridrl.data.tokenizer import Tokenizer
from hybridrl.errors import DataError

MAX_LISTED_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a file hold what.

    Attributes:
        prompt_id: Column of a unique id; None numbers the rows.
    """

    prompt: str
    answer: str
    prompt_id: str | None = None


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read at all."""

    problem: str


Row = Mapping[str, object] | BadRow


def read_prompts(path: Path, columns: Columns, tokenizer: Tokenizer, max_prompt_tokens: int) -> tuple[Prompt, ...]:
    """Read and tokenise every prompt of a file.

    Args:
        max_prompt_tokens: Longest prompt allowed, with the tokens that the tokenizer puts first.

    Raises:
        DataError: Listing each faulty row as ``file:row: fault`` (the first 20, and how many more).
    """
    check = _RowCheck(path, columns, tokenizer, max_prompt_tokens)
    prompts: list[Prompt] = []
    for number, row in _rows(path, columns):
        if isinstance(row, BadRow):
            check.report(number, row.problem)
        elif (prompt := check.prompt(number, row)) is not None:
            prompts.append(prompt)
    if check.problems:
        raise DataError(_listing(check.problems))
    if not prompts:
        raise DataError(f"{path}: no rows; expected at least one prompt")
    return tuple(prompts)


@dataclass(slots=True)
class _RowCheck:
    """Turns rows of one file into prompts and gathers what is wrong with them."""

    path: Path
    columns: Columns
    tokenizer: Tokenizer
    max_prompt_tokens: int
    problems: list[str] = field(default_factory=list)
    _rows_of_ids: dict[str, int] = field(default_factory=dict)

    def report(self, number: int, problem: str) -> None:
        """Note a fault of a row."""
        self.problems.append(f"{self.path}:{number}: {problem}")

    def prompt(self, number: int, row: Mapping[str, object]) -> Prompt | None:
        """Return the prompt of a row, or note its faults."""
        num_before = len(self.problems)
        text, token_ids = self._text(number, row)
        answer = self._answer(number, row)
        prompt_id = self._prompt_id(number, row)
        if len(self.problems) > num_before:
            return None
        return Prompt(prompt_id, token_ids, text, answer, f"{self.path}:{number}")

    def _text(self, number: int, row: Mapping[str, object]) -> tuple[str, tuple[int, ...]]:
        key = self.columns.prompt
        text = self._value(number, row, key, "the prompt text")
        if text is None:
            return "", ()
        if not isinstance(text, str):
            self.report(number, f"{key!r} is {_shown(text)}, expected text")
        elif not text.strip():
            self.report(number, f"{key!r} is empty, expected a prompt; fill it in or remove the row")
        elif not _is_unicode(text):
            self.report(number, f"{key!r} holds half of a surrogate pair, expected Unicode text; correct the escape")
        else:
            token_ids = self.tokenizer.encode_prompt(text)
            if len(token_ids) > self.max_prompt_tokens:
                limit = f"at most {self.max_prompt_tokens} (data.max_prompt_tokens)"
                self.report(
                    number, f"prompt of {len(token_ids)} tokens, expected {limit}; shorten it or raise the limit"
                )
            return text, token_ids
        return "", ()

    def _answer(self, number: int, row: Mapping[str, object]) -> str:
        key = self.columns.answer
        answer = self._value(number, row, key, "the answer that the reward compares with")
        if answer is None or (isinstance(answer, str) and _is_unicode(answer)):
            return answer or ""
        is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
        if is_number and math.isfinite(answer):  # type: ignore[arg-type]
            return str(answer)
        self.report(number, f"{key!r} is {_shown(answer)}, expected text or a number")
        return ""

    def _prompt_id(self, number: int, row: Mapping[str, object]) -> str:
        key = self.columns.prompt_id
        if key is None:
            return f"{self.path.name}:{number}"
        value = self._value(number, row, key, "a unique id")
        if value is None:
            return ""
        if not isinstance(value, str | int) or isinstance(value, bool):
            self.report(number, f"{key!r} is {_shown(value)}, expected text or a whole number")
            return ""
        first = self._rows_of_ids.setdefault(str(value), number)
        if first != number:
            self.report(number, f"{key!r} is {_shown(value)} as in row {first}, expected a unique id")
        return str(value)

    def _value(self, number: int, row: Mapping[str, object], key: str, meaning: str) -> object:
        value = row.get(key)
        if value is None:
            got = f"{key!r} is null" if key in row else f"no key {key!r} (keys: {', '.join(map(repr, row)) or 'none'})"
            self.report(number, f"{got}, expected {meaning}")
        return value


def _rows(path: Path, columns: Columns) -> Iterator[tuple[int, Row]]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected a .jsonl or .parquet file with prompts")
    if path.suffix == ".jsonl":
        return _jsonl_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path, columns)
    raise DataError(f"{path}: suffix {path.suffix!r}, expected .jsonl or .parquet; convert or rename the file")


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
    return row if isinstance(row, dict) else BadRow(f"got {_shown(row)}, expected a JSON object")


def _parquet_rows(path: Path, columns: Columns) -> Iterator[tuple[int, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = [name for name in (columns.prompt, columns.answer, columns.prompt_id) if name is not None]
    try:
        file = pq.ParquetFile(path)
        missing = [name for name in wanted if name not in file.schema_arrow.names]
        if missing:
            there = ", ".join(map(repr, file.schema_arrow.names))
            raise DataError(f"{path}: no column {', '.join(map(repr, missing))}, the file has {there}; set data.*_key")
        number = 0
        for batch in file.iter_batches(columns=wanted):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pa.ArrowInvalid, OSError) as e:
        raise DataError(f"{path}: not a readable parquet file ({e}); write it again") from e


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _listing(problems: list[str]) -> str:
    shown = problems[:MAX_LISTED_PROBLEMS]
    more = len(problems) - len(shown)
    return "\n".join(shown + ([f"... and {more} more faults"] if more else []))
