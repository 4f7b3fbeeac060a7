"""``hang/stacks.txt``: what every process of a run was doing when it had stopped moving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridrl.observability.files import write_text_atomic
from hybridrl.observability.stacks import STATES, ProcessReport, Stack


def write_report(folder: Path, sentence: str, reports: Sequence[ProcessReport]) -> Path:
    """Write the verdict and all stacks; an earlier report in the folder stays. Return the path."""
    folder.mkdir(exist_ok=True)
    path, number = folder / "stacks.txt", 1
    while path.exists():
        number += 1
        path = folder / f"stacks-{number}.txt"
    write_text_atomic(path, "\n".join(_lines(sentence, reports)) + "\n")
    return path


def _lines(sentence: str, reports: Sequence[ProcessReport]) -> Iterator[str]:
    yield sentence
    for report in reports:
        yield ""
        state = STATES.get(report.state, f"state {report.state}")
        yield f"==== {report.identity} (pid {report.pid} on {report.host}, {state}){report.doing and f': {report.doing}'}"
        if not report.stacks:
            yield "no stacks: it does not answer"
        for number, stack in enumerate(reversed(report.stacks or ())):
            yield f"-- {'main thread' if number == 0 else f'thread {number}'}, innermost call first"
            yield from _frames(stack)


def _frames(stack: Stack) -> Iterator[str]:
    for frame in stack:
        yield f"  {frame.file}:{frame.line} in {frame.function}"
        if frame.source:
            yield f"    {frame.source}"
