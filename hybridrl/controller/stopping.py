"""How a run is asked to end early.

Ctrl-C     now: KeyboardInterrupt, wherever the controller is
SIGUSR1    after the step under way, with a checkpoint, so that the run can go on from there; schedulers send it before a time limit
SIGTERM    as SIGUSR1 where the run makes checkpoints, since schedulers announce preemption by it; otherwise, and the second time, now
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

EXIT_FAILED, EXIT_INTERRUPTED, EXIT_GO_ON = 1, 130, 75  # 75 is EX_TEMPFAIL: start the same command again
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether the run was asked to end after the step under way.

    Args:
        on_term: Whether the first SIGTERM asks for that.
    """

    def __init__(self, *, on_term: bool = False) -> None:
        self.on_term = on_term
        self.is_made = False


@contextlib.contextmanager
def stop_signals(request: StopRequest | None = None) -> Iterator[None]:
    """Note a request, turn the first signal to stop now into KeyboardInterrupt, and let no second one disturb the clean-up, which is bounded."""

    def ask(number: int, frame: FrameType | None) -> None:
        if request is not None:
            request.is_made = True

    def terminate(number: int, frame: FrameType | None) -> None:
        if request is not None and request.on_term and not request.is_made:
            request.is_made = True
        else:
            interrupt(number, frame)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in _STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: terminate}
    if request is not None:
        handlers[signal.SIGUSR1] = ask
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
