"""Files that are whole at any moment: a fresh folder per run, and replacement by rename."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def create_run_dir(runs_dir: Path, name: str) -> Path:
    """Make and return ``<runs_dir>/<name>``, or ``<name>-2``, ``<name>-3``, ... when that exists.

    Two runs that start at the same moment get different folders.
    """
    runs_dir.mkdir(parents=True, exist_ok=True)
    run_dir, number = runs_dir / name, 1
    while True:
        try:
            run_dir.mkdir()
        except FileExistsError:
            number += 1
            run_dir = runs_dir / f"{name}-{number}"
        else:
            return run_dir


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`, and move it onto `path` when the block succeeds.

    Readers see the old content or the new one, never a part. When the block raises, `path` stays as it was and the
    temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
