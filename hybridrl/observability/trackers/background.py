"""A tracker behind a queue: a server that does not answer holds up a thread, and not the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial

from hybridrl.observability.records import Metric, Outcome
from hybridrl.observability.trackers.tracker import Tracker

MAX_PENDING_STEPS = 1000
CLOSE_TIMEOUT_S = 30.0

_unfinished: set[BackgroundTracker] = set()


def has_unfinished_trackers() -> bool:
    """Whether a tracker was not seen to finish; hooks that its client has left may hold up the end of the process."""
    return bool(_unfinished)


class BackgroundTracker:
    """Hands everything to a tracker on a daemon thread, in order. See :class:`hybridrl.observability.trackers.tracker.Tracker`.

    What the tracker raises is raised by the next call; nothing is handed to it after that.

    Args:
        max_pending_steps: How many steps may wait for the tracker.
        close_timeout_s: How long closing waits for it.
    """

    def __init__(
        self, tracker: Tracker, *, max_pending_steps: int = MAX_PENDING_STEPS, close_timeout_s: float = CLOSE_TIMEOUT_S
    ) -> None:
        self.name = tracker.name
        self._tracker = tracker
        self._close_timeout_s = close_timeout_s
        self._pending: queue.Queue[Callable[[], None]] = queue.Queue(max_pending_steps)
        self._failure: Exception | None = None
        _unfinished.add(self)
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def append(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Take the metrics of one step.

        Raises:
            TimeoutError: As many steps as may wait do so already.
            Exception: What the tracker has raised.
        """
        self._put(partial(self._tracker.append, step, dict(metrics)))

    def close(self, outcome: Outcome) -> None:
        """Finish; no step follows.

        Raises:
            TimeoutError: The tracker has not finished in time; it is left behind, and ends with the process.
            Exception: What the tracker has raised.
        """
        self._put(partial(self._finish, outcome))
        self._thread.join(self._close_timeout_s)
        self._raise_failure()
        if self._thread.is_alive():
            raise TimeoutError(f"not finished {self._close_timeout_s:g} s after the run; what it has not sent is lost")

    def _put(self, action: Callable[[], None]) -> None:
        self._raise_failure()
        try:
            self._pending.put_nowait(action)
        except queue.Full:
            raise TimeoutError(f"it has not taken the metrics of the last {self._pending.maxsize} steps") from None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _finish(self, outcome: Outcome) -> None:
        self._tracker.close(outcome)
        _unfinished.discard(self)

    def _work(self) -> None:
        try:
            while self in _unfinished:
                self._pending.get()()
        except Exception as e:  # noqa: BLE001  # another program's client, at a process boundary; the next call raises it
            self._failure = e
