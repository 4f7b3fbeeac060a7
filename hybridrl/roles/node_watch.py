"""The processes of a run on all its nodes: their progress, their stacks and their end.

The controller's own node is looked at from the controller itself; each other node has a process for it that does nothing until it is
asked. A node that does not answer in time counts as without news: what was known of it stays.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridrl.observability import stacks
from hybridrl.observability.stacks import ProcessReport
from hybridrl.roles.node import this_node

T = TypeVar("T")
_ANSWER_S = 10.0


class NodeWatch:
    """Looks at one node."""

    def progress(self, session: str) -> dict[int, int]:
        """See :func:`stacks.progress`."""
        return stacks.progress(session)

    def collect(self, session: str, timeout_s: float) -> list[ProcessReport]:
        """See :func:`stacks.collect`."""
        return stacks.collect(session, timeout_s)

    def kill(self, session: str) -> None:
        """See :func:`stacks.kill`."""
        stacks.kill(session)


class NodeWatches:
    """Looks at every node of a run.

    Args:
        session: The run's.
    """

    def __init__(self, session: str) -> None:
        self.session = session
        self._others: list[ActorHandle[NodeWatch]] = []
        self._tables: list[dict[int, int]] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reaching(self, nodes: Sequence[str]) -> Iterator[None]:
        """Look at these nodes too, by Ray's names, for as long as the context lasts; Ray must outlast it."""
        remote = ray.remote(NodeWatch)
        for node in sorted(set(nodes) - {this_node()}):
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            self._others.append(remote.options(num_cpus=0, scheduling_strategy=where).remote())
        try:
            yield
        finally:
            with self._lock:
                self._others.clear()

    def progress(self) -> list[dict[int, int]]:
        """Return the count of work done by process, one table per node."""
        self._tables = latest(self._ask("progress", lambda: stacks.progress(self.session)), self._tables)
        return self._tables

    def collect(self, timeout_s: float) -> list[ProcessReport]:
        """Return how every process stands."""
        parts = self._ask("collect", lambda: stacks.collect(self.session, timeout_s), timeout_s)
        return [report for part in parts for report in part or ()]

    def kill(self) -> None:
        """End every process but this one, also stopped ones."""
        self._ask("kill", lambda: stacks.kill(self.session, spare=[os.getpid()]))

    def _ask(self, method: str, here: Callable[[], T], *arguments: Any) -> list[T | None]:
        """Ask this node, then all others at once; return their answers, None for those that do not come in time."""
        own = here()
        with self._lock:
            calls = [getattr(watch, method).remote(self.session, *arguments) for watch in self._others]
            return [own, *_answers(calls)]


def latest(answers: Sequence[dict[int, int] | None], before: Sequence[dict[int, int]]) -> list[dict[int, int]]:
    """Return a table per node: its answer, or what it answered before."""
    pairs = itertools.zip_longest(answers, before, fillvalue=None)
    return [(old or {}) if new is None else new for new, old in pairs]


def _answers(calls: list[Any]) -> list[Any]:
    """Return the answers, None for those that do not come in time."""
    if not calls:
        return []
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_S)
    return [_answer(call) if call in ready else None for call in calls]


def _answer(call: Any) -> Any:
    try:
        return ray.get(call)
    except ray.exceptions.RayError:  # the node is gone: the ranks on it say so themselves
        return None
