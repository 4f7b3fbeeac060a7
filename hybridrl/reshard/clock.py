"""Adds up the time that a rank spends on each part of its work."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType


class Clock:
    """Seconds under "copy", "checksum" and "total"."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"copy": 0.0, "checksum": 0.0, "total": 0.0}

    def time(self, name: str) -> AbstractContextManager[None]:
        """Time a block of code under a name."""
        return _Lap(self.seconds, name)


@dataclass(slots=True)
class _Lap:
    seconds: dict[str, float]
    name: str
    start: float = field(default=0.0)

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds[self.name] += time.perf_counter() - self.start
