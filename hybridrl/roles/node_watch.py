"""The processes of a run on all its nodes: their progress, their stacks and their end.

The controller's own node is looked at from the controller itself; each other node has a process for it that does nothing until it is
asked. A node that does not answer in time counts as without news.
"""

from __future__ import annotations

import contextlib
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
        """Return the count of work done by process, one table per node that answers."""
        return self._ask("progress", lambda: stacks.progress(self.session))

    def collect(self, timeout_s: float) -> list[ProcessReport]:
        """Return how every process stands."""
        parts = self._ask("collect", lambda: stacks.collect(self.session, timeout_s), timeout_s)
        return [report for part in parts for report in part]

    def kill(self) -> None:
        """End every process but this one, also stopped ones."""
        self._ask("kill", lambda: stacks.kill(self.session, spare=[os.getpid()]))

    def _ask(self, method: str, here: Callable[[], T], *arguments: Any) -> list[T]:
        """Ask all nodes at once; return this node's answer and those that come in time."""
        with self._lock:
            calls = [getattr(watch, method).remote(self.session, *arguments) for watch in self._others]
            return [here(), *_answers(calls)]


def _answers(calls: list[Any]) -> list[Any]:
    """Return the answers that come in time."""
    if not calls:
        return []
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_S)
    found = []
    for call in ready:
        try:
            found.append(ray.get(call))
        except ray.exceptions.RayError:  # the node is gone: the ranks on it say so themselves
            continue
    return found
