"""Ends a run that has stopped moving, and says who holds it up.

    controller, main thread     phases, answers, scores ---> its heartbeat
    ranks, replicas, rewards    work done -----------------> theirs
    this thread                 looks at all heartbeats; none has moved for the limit -> stacks of all processes -> verdict
                                -> interrupts the main thread, which raises it -> SIGKILL to every process of the run

Limit: `trainer.hang_timeout_s` in steps. While a role starts, and before and after the steps, ranks load or write whole checkpoints and vLLM
compiles, which no heartbeat shows: there it is what `trainer.startup_timeout_s` allows. Outside :meth:`HangWatch.raised`, while Ray starts or
ends, the main thread's waits have that very bound; the limit lies beyond it, so that their own errors come first.

Invariants: every wait is bounded; what holds the run, such as a file system, may hold the look at its processes too. A main thread that
does not react within `_REACT_S`, or does not get the run down within `_CLEAN_UP_S`, is ended with the whole process, and with the exit code
that the error would have had.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from hybridrl.config.schema import TrainerConfig
from hybridrl.errors import HangError
from hybridrl.observability import stacks
from hybridrl.observability.hang_report import write_report
from hybridrl.observability.hang_verdict import CONTROLLER, headline, verdict
from hybridrl.observability.heartbeat import HEARTBEAT, Identity
from hybridrl.roles.deadline import inner_s
from hybridrl.roles.group import Calls, Observe, unobserved
from hybridrl.roles.node_watch import NodeWatches

_LOOKS_PER_LIMIT = 20
_COLLECT_S = 5.0
_LOOK_S = 30.0
_REACT_S = 10.0
_CLEAN_UP_S = 60.0


class HangWatch:
    """Watches one run, from a thread of its own, for as long as the context lasts; the context is entered by the main thread.

    Args:
        timeouts: The limits.
        run_dir: Gets ``hang/`` with the stacks.
        phases: Returns the phases that the controller is in.
        exit_code: Of the process when the main thread cannot be brought to end it.
        observe: Told of every answer of a rank or replica.

    Attributes:
        session: What the run's processes show their heartbeats under.
        nodes: Told where they are.
        calls: Told what the controller waits for.
    """

    def __init__(
        self,
        timeouts: TrainerConfig,
        run_dir: Path,
        phases: Callable[[], Sequence[str]],
        exit_code: int,
        observe: Observe = unobserved,
    ) -> None:
        self.session = uuid.uuid4().hex[:12]
        self.nodes = NodeWatches(self.session)
        self.calls = Calls(observe)
        self._timeouts = timeouts
        self._run_dir = run_dir
        self._phases = phases
        self._exit_code = exit_code
        self._is_in_steps = False
        self._error: HangError | None = None
        self._may_interrupt = False
        self._lock = threading.Lock()
        self._has_reacted = threading.Event()
        self._are_killed = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hybridrl-hang-watch", daemon=True)

    def __enter__(self) -> HangWatch:
        HEARTBEAT.show(Identity(self.session, CONTROLLER))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed.set()
        self._thread.join()
        HEARTBEAT.hide()

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Raise the verdict out of whatever the main thread does inside.

        Raises:
            HangError: Nothing has moved for the limit.
        """
        self._may_interrupt = True
        try:
            yield
        except KeyboardInterrupt:
            if self._error is None:
                raise
            self._has_reacted.set()
            self._are_killed.wait(_REACT_S)
            raise self._error from None
        finally:
            with self._lock:
                self._may_interrupt = False

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """Hold what runs inside to the limit of steps."""
        self._is_in_steps = True
        try:
            yield
        finally:
            self._is_in_steps = False

    def _limit_s(self) -> float:
        is_starting = any(call.phase == "start" for call in self.calls.pending())
        if self._is_in_steps and not is_starting:
            return self._timeouts.hang_timeout_s
        startup_s = self._timeouts.startup_timeout_s
        return inner_s(startup_s) if self._may_interrupt else startup_s + _CLEAN_UP_S

    def _watch(self) -> None:
        interval_s = self._timeouts.hang_timeout_s / _LOOKS_PER_LIMIT
        seen, since = self._standing(), time.monotonic()
        while not self._is_closed.wait(interval_s):
            now = self._standing()
            if now is None or now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since >= self._limit_s():
                error = self._judge(time.monotonic() - since)
                if self._standing() == seen:  # nothing moved while stacks were taken, either
                    self._end(error)
                    return

    def _standing(self) -> tuple[list[dict[int, int]], bool] | None:
        """Return the counts of all heartbeats, and where the main thread is; None when they could not be read, which is told and no hang."""
        try:
            return self.nodes.progress(), self._may_interrupt
        except Exception:  # noqa: BLE001 - a fault of the watch must neither end a run nor leave it unwatched
            traceback.print_exc()
            return None

    def _judge(self, seconds: float) -> HangError:
        """Look at all processes, from a thread that can be left behind."""
        found: list[HangError] = []
        look = threading.Thread(
            target=lambda: found.append(self._look(seconds)), name="hybridrl-hang-look", daemon=True
        )
        look.start()
        look.join(_LOOK_S)
        if found:
            return found[0]
        unseen = f"looking at the processes gave no answer within {_LOOK_S:g} s: perhaps a file system that does not answer holds them all"
        return HangError(headline(self._phases(), seconds, unseen))

    def _look(self, seconds: float) -> HangError:
        reports, pending, phases = self.nodes.collect(_COLLECT_S), self.calls.pending(), self._phases()
        sentence = verdict(reports, pending, phases, seconds)
        try:
            where = f"are in {write_report(self._run_dir / 'hang', sentence, reports)}"
        except OSError as e:  # perhaps what hangs is the file system
            where = f"could not be written: {e}"
        return HangError(f"{sentence}\nThe stacks of all {len(reports)} processes {where}")

    def _end(self, error: HangError) -> None:
        """Have the main thread raise the error; end the process when it does not."""
        self._error = error
        with self._lock:
            is_asked, main = self._may_interrupt, threading.main_thread().ident
            if is_asked and main is not None:
                signal.pthread_kill(main, signal.SIGINT)
        if not is_asked and self._is_closed.wait(_REACT_S):  # it ends the run by itself, with an error of its own
            return
        has_reacted = is_asked and self._has_reacted.wait(_REACT_S)
        self.nodes.kill()
        self._are_killed.set()
        if has_reacted and self._is_closed.wait(_CLEAN_UP_S):
            return
        print(f"hybridrl: the run failed (HangError)\n  {error}", file=sys.stderr, flush=True)
        stacks.end_process(self._exit_code)
