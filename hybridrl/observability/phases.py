"""Wall time of the named phases of a step.

Phases may nest and may overlap (with ``max_policy_lag`` above 0 the next rollout runs while the actor trains), from
several threads or tasks: every phase counts its own wall time, so their sum may exceed the step's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybridrl.observability.heartbeat import HEARTBEAT


class PhaseTimer:
    """Accumulates seconds per phase until they are taken.

    Args:
        on_change: Called with the names of the phases that run now, whenever one starts or ends.
        on_end: Called with the name of a phase that has ended, and when it started and ended by time.perf_counter().
    """

    def __init__(
        self, on_change: Callable[[tuple[str, ...]], None], on_end: Callable[[str, float, float], None]
    ) -> None:
        self._on_change = on_change
        self._on_end = on_end
        self._lock = threading.Lock()
        self._running: list[str] = []
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the enclosed block and add it to `name`, also when the block raises."""
        started = time.perf_counter()
        self._change(lambda: self._running.append(name))
        try:
            yield
        finally:
            ended = time.perf_counter()
            self._change(lambda: self._leave(name, started, ended))

    @property
    def running(self) -> tuple[str, ...]:
        """The phases that run now."""
        with self._lock:
            return tuple(self._running)

    def take(self) -> dict[str, float]:
        """Return ``time_s/<phase>`` of all phases since the last call and ``time_s/step`` since then, and start anew."""
        now = time.perf_counter()
        with self._lock:
            times = {f"time_s/{name}": seconds for name, seconds in self._seconds.items()}
            times["time_s/step"] = now - self._since
            self._seconds, self._since = {}, now
        return times

    def _leave(self, name: str, started: float, ended: float) -> None:
        self._running.remove(name)
        self._seconds[name] = self._seconds.get(name, 0.0) + ended - started
        self._on_end(name, started, ended)

    def _change(self, action: Callable[[], None]) -> None:
        with self._lock:
            action()
            running = tuple(self._running)
        HEARTBEAT.advance()
        self._on_change(running)
