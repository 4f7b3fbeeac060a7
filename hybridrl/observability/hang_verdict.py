"""Who holds a run up: one sentence, from what every process was doing when nothing had moved for too long.

A process is silent (it shows no stacks), at work, waiting for its peers in a collective or a transfer, or idle: waiting for its next
call. The first of these that there is, is the cause:

    silent             the others wait for it
    at work            it has not joined the collective that its peers wait in, or it is what the controller waits for
    the controller     it waits for nobody
    idle               while its peers wait in a collective: it left, or was never called
    nobody             all are in the collective, which itself does not end; or an answer went missing

Pure: stacks in, sentence out. On GPUs a collective ends on the device, after the host has left it; the stack then shows where the host
waits for the device.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridrl.observability.stacks import STATES, Frame, ProcessReport, Stack

CONTROLLER = "controller"
_MAX_HOSTS = 4
_WAITS_FOR_PEERS = (
    ("torch/distributed/", None),
    ("megatron/core/pipeline_parallel/p2p_communication.py", "the pipeline's send and receive"),
    ("hybridrl/reshard/transports/", "the weight transfer"),
)
"""Files that move data between ranks, and what the call is named after; None: after the function that was called."""
_ASYNC_COLLECTIVES = "megatron/core/"
_IDLE = (
    ("ray/_private/worker.py", "main_loop"),
    ("vllm/v1/engine/core.py", "_process_input_queue"),
    ("hybridrl/rewards/worker.py", "main"),
)
"""Where processes wait for their next call, once the frames of the standard library are left out."""
_IDLE_BELOW = (("vllm/distributed/device_communicators/shm_broadcast.py", "acquire_read"),)
"""Calls below which a process waits, with frames of other packages in between."""
_CONTROLLER_WAITS = (("hybridrl/roles/future.py", "wait_all"), ("hybridrl/rewards/score.py", "_wait"))
_PACKAGES = re.compile(r"/(site|dist)-packages/(?!hybridrl/)")
_STANDARD = re.compile(r"/lib/python3[^/]*/(?!(site|dist)-packages/)|<frozen ")


class Standing(enum.Enum):
    """How a process stands."""

    SILENT = "silent"
    AT_WORK = "at work"
    IN_COLLECTIVE = "in a collective"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Call:
    """What a process is in.

    Attributes:
        name: Of the collective or transfer, or the line of source.
        caller: Who called it.
    """

    name: str
    caller: Frame

    def __str__(self) -> str:
        """Return it with its place."""
        return f"{self.name} ({self.caller})"


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that a rank has not answered."""

    role: str
    rank: int
    phase: str


@dataclass(frozen=True, slots=True)
class Standpoint:
    """A process, how it stands and in what call."""

    report: ProcessReport
    standing: Standing
    call: Call | None = None


def standpoint(report: ProcessReport) -> Standpoint:
    """Read the stacks of one process."""
    if not report.stacks:
        return Standpoint(report, Standing.SILENT)
    main, others = report.stacks[-1], report.stacks[:-1]
    for stack in (main, *others):
        if call := _collective(stack):
            return Standpoint(report, Standing.IN_COLLECTIVE, call)
    if report.identity.role == CONTROLLER:
        is_waiting = any(_is_at(frame, _CONTROLLER_WAITS) for frame in main)
        return Standpoint(report, Standing.IDLE if is_waiting else Standing.AT_WORK, _call(main))
    if not _is_idle(main):
        return Standpoint(report, Standing.AT_WORK, _call(main))
    is_async = _is_at(main[0], _IDLE[:1])
    for stack in others if is_async else ():  # the event loop runs beside the main thread
        if any(not (_PACKAGES.search(f.file) or _STANDARD.search(f.file)) for f in stack):
            return Standpoint(report, Standing.AT_WORK, _call(stack))
    return Standpoint(report, Standing.IDLE)


def verdict(
    reports: Sequence[ProcessReport], pending: Sequence[PendingCall], phases: Sequence[str], seconds: float
) -> str:
    """Return the sentence.

    Args:
        pending: Calls that are not answered.
        phases: Of the controller, that run now.
        seconds: Since anything moved.
    """
    cause, text = _cause([standpoint(report) for report in reports], pending)
    calls = [call.phase for call in pending if not cause or any(_is_of(report, call) for report in cause)]
    where = _hosts(cause) if len({report.host for report in reports}) > 1 else ""
    return headline(calls or phases, seconds, text + where)


def headline(phases: Sequence[str], seconds: float, text: str) -> str:
    """Return where a run hangs, since when, and what is known of it."""
    place = f"in phase {_joined(phases)}" if phases else "between phases"
    return f"hang {place}: no progress for {seconds:.0f} s; {text}"


def _cause(points: Sequence[Standpoint], pending: Sequence[PendingCall]) -> tuple[list[ProcessReport], str]:
    """Return who holds the run up, and what to say of it."""
    at = {standing: [point for point in points if point.standing is standing] for standing in Standing}
    waiting = at[Standing.IN_COLLECTIVE]
    others = f", while {_waiters(waiting)}" if waiting else ""
    if silent := at[Standing.SILENT]:
        text = "; ".join(f"{point.report.identity} is {_state(point.report)}" for point in silent)
        return _reports(silent), text + others
    working = [point for point in at[Standing.AT_WORK] if point.report.identity.role != CONTROLLER]
    missing = [point for point in working if any(_are_peers(point, other) for other in waiting)]
    if culprits := missing or working or at[Standing.AT_WORK]:
        return _reports(culprits), _missing(culprits, waiting)
    absent = [p for p in at[Standing.IDLE] if any(_are_peers(p, other) for other in waiting)]
    if absent:
        return _reports(absent), f"{_names(absent)} {'is' if len(absent) == 1 else 'are'} in no call{others}"
    if waiting:
        is_one = len(_by_call(waiting)) == 1
        end = (
            "all that take part are in it, and it does not end"
            if is_one
            else "nobody is outside these calls, and none ends"
        )
        return _reports(waiting), f"{_waiters(waiting)}: {end}"
    names = _joined([f"{call.role} rank {call.rank}" for call in pending]) or "nobody"
    return [], f"{names} owes an answer, and every process waits for its next call"


def _missing(working: Sequence[Standpoint], waiting: Sequence[Standpoint]) -> str:
    """Say what the processes at work are in, and who waits for them."""
    work = "; ".join(
        f"{_names(members)} {'is' if len(members) == 1 else 'are'} in {call}{_doing(members)}"
        for call, members in _by_call(working)
    )
    if not waiting:
        return work
    (call, members), *more = _by_call(waiting)
    peers = f"{call}, in which {_names(members)} wait{'s' if len(members) == 1 else ''}" if not more else "its peers"
    has = "has" if len(working) == 1 else "have"
    return f"{_names(working)} {has} not joined {peers}{f': {_waiters(waiting)}' if more else ''}; {work}"


def _waiters(waiting: Sequence[Standpoint]) -> str:
    return "; ".join(
        f"{_names(members)} wait{'s' if len(members) == 1 else ''} in {call}" for call, members in _by_call(waiting)
    )


def _by_call(points: Sequence[Standpoint]) -> list[tuple[str, list[Standpoint]]]:
    calls = dict.fromkeys(str(point.call) for point in points)
    return [(call, [point for point in points if str(point.call) == call]) for call in calls]


def _doing(points: Sequence[Standpoint]) -> str:
    texts = _joined([point.report.doing for point in points if point.report.doing])
    return f" for {texts}" if texts else ""


def _names(points: Iterable[Standpoint]) -> str:
    """Name processes, the ranks of a role together."""
    ranks: dict[str, list[int]] = {}
    names = []
    for identity in (point.report.identity for point in points):
        if identity.rank is None or identity.part:
            names.append(str(identity))
        else:
            ranks.setdefault(identity.role, []).append(identity.rank)
    grouped = [
        f"{role} rank{'s' if len(of) > 1 else ''} {', '.join(map(str, sorted(of)))}" for role, of in ranks.items()
    ]
    return _joined([*grouped, *names])


def _state(report: ProcessReport) -> str:
    return STATES.get(report.state, f"not answering (process state {report.state})")


def _joined(names: Sequence[str]) -> str:
    return " and ".join(dict.fromkeys(names))


def _reports(points: Sequence[Standpoint]) -> list[ProcessReport]:
    return [point.report for point in points]


def _hosts(reports: Iterable[ProcessReport]) -> str:
    """Say where processes run."""
    hosts = sorted({report.host for report in reports})
    more = f" and {len(hosts) - _MAX_HOSTS} more hosts" if len(hosts) > _MAX_HOSTS else ""
    return f" (on {', '.join(hosts[:_MAX_HOSTS])}{more})" if hosts else ""


def _are_peers(a: Standpoint, b: Standpoint) -> bool:
    return a.report.identity.role == b.report.identity.role


def _is_of(report: ProcessReport, call: PendingCall) -> bool:
    identity = report.identity
    return call.role in identity.role.split("+") and call.rank == identity.rank


def _collective(stack: Stack) -> Call | None:
    """Return the collective or transfer that a thread is in, as its caller called it."""
    for around, name in _WAITS_FOR_PEERS:
        inside = [position for position, frame in enumerate(stack) if around in frame.file]
        if inside and inside[-1] + 1 < len(stack):
            functions = [stack[position].function for position in inside]
            outermost = next((function for function in reversed(functions) if function != "wrapper"), "wrapper")
            return Call(name or outermost, stack[inside[-1] + 1])
    call = _call(stack)
    is_handle = call is not None and _ASYNC_COLLECTIVES in call.caller.file and ".wait(" in call.caller.source
    return call if is_handle else None


def _call(stack: Stack) -> Call | None:
    """Return the innermost line that is not the standard library's."""
    frame = next((frame for frame in stack if not _STANDARD.search(frame.file)), None)
    return None if frame is None else Call(f"`{frame.source or frame.function}`", frame)


def _is_idle(stack: Stack) -> bool:
    call = _call(stack)
    return call is None or _is_at(call.caller, _IDLE) or any(_is_at(frame, _IDLE_BELOW) for frame in stack)


def _is_at(frame: Frame, places: Iterable[tuple[str, str]]) -> bool:
    return any(frame.file.endswith(file) and frame.function == function for file, function in places)
