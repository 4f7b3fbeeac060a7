"""How a run is asked to end early.

Ctrl-C, SIGTERM   now: KeyboardInterrupt, wherever the controller is
SIGUSR1           after the step under way, with a checkpoint, so that the run can go on from there; schedulers send it
before a time limit
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

EXIT_FAILED, EXIT_INTERRUPTED, EXIT_GO_ON = 1, 130, 75  # 75 is EX_TEMPFAIL: start the same command again
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether SIGUSR1 has come."""

    def __init__(self) -> None:
        self.is_made = False

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Note SIGUSR1 for as long as the context lasts."""

        def note(number: int, frame: FrameType | None) -> None:
            self.is_made = True

        before = signal.signal(signal.SIGUSR1, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Turn the first Ctrl-C or SIGTERM into KeyboardInterrupt, and let no second one disturb the clean-up, which is bounded."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in _STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
