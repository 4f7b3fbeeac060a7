"""Each pair of ranks by its own way: shared memory inside a node, gloo between nodes.

The two ways run at the same time, each in its own chunk order. A destination's messages pass a gate, so that it still takes chunk
after chunk over both, relays a chunk when it has come over both, and no two callbacks ever run at once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace

import torch

from hybridrl.errors import PeerLostError, ReshardError
from hybridrl.layout.shard import Place
from hybridrl.reshard.transports import Endpoint, Fill, Label, Rendezvous, Transport
from hybridrl.reshard.transports.gloo import GlooTransport
from hybridrl.reshard.transports.shm import ShmTransport

_Turn = tuple[int, bool]  # chunk, and whether a destination passes it on


class MixedTransport:
    """Routes each peer by where it is; see :class:`hybridrl.reshard.transports.Transport`."""

    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._gate = _Gate(endpoint.place)
        deadline = time.monotonic() + rendezvous.timeout_s
        far: Transport = GlooTransport(rendezvous, endpoint.only(same_node=False))
        left = replace(rendezvous, timeout_s=max(0.1, deadline - time.monotonic()))
        try:
            near: Transport = ShmTransport(left, endpoint.only(same_node=True))
        except (ReshardError, OSError):
            far.close()
            raise
        self._ways = {True: near, False: far}
        self._pool = ThreadPoolExecutor(len(self._ways), "hybridrl-transport")

    @property
    def staging_bytes(self) -> int:
        """Of both ways together."""
        return sum(way.staging_bytes for way in self._ways.values())

    def submit_send(self, destination: int, label: Label, fill: Fill) -> None:
        """Queue a message for a destination."""
        own = self._endpoint
        ordered = self._gate.serial(fill) if own.is_source else self._gate.in_turn((label.chunk, True), fill)
        self._way(own.sender, destination).submit_send(destination, label, ordered)

    def submit_recv(self, sender: int, label: Label, drain: Fill) -> None:
        """Queue a receipt."""
        own = self._endpoint
        turn = (label.chunk, sender >= len(own.plan.sources))
        self._way(sender, own.index).submit_recv(sender, label, self._gate.in_turn(turn, drain))

    def run(self, deadline_s: float) -> None:
        """Run both ways; the first error of either is raised at once, and `close` ends the other."""
        self._gate.start(deadline_s)
        futures = [self._pool.submit(way.run, deadline_s) for way in self._ways.values()]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            self._gate.abort()
        for future in sorted(futures, key=lambda future: future not in done):
            future.result()

    def close(self) -> None:
        """Close both ways."""
        for way in self._ways.values():
            way.close()
        self._pool.shutdown(wait=False)

    def _way(self, sender: int, destination: int) -> Transport:
        return self._ways[self._endpoint.plan.is_near(sender, destination)]


class _Gate:
    """Lets callbacks through one at a time, in turns: those of a chunk after all of the chunks before, relays last."""

    def __init__(self, me: Place) -> None:
        self._me = me
        self._changed = threading.Condition()
        self._open: Counter[_Turn] = Counter()
        self._deadline = 0.0
        self._is_aborted = False

    def start(self, deadline_s: float) -> None:
        self._deadline = time.monotonic() + deadline_s

    def serial(self, fill: Fill) -> Fill:
        def call(buffer: torch.Tensor) -> None:
            with self._changed:
                fill(buffer)

        return call

    def in_turn(self, turn: _Turn, callback: Fill) -> Fill:
        self._open[turn] += 1

        def call(buffer: torch.Tensor) -> None:
            with self._changed:
                left = max(0.001, self._deadline - time.monotonic())
                if not self._changed.wait_for(lambda: self._is_aborted or self._is_first(turn), left):
                    raise PeerLostError(f"{self._me}: timed out until what comes before chunk {turn[0]} is complete")
                if self._is_aborted:
                    raise ReshardError(f"{self._me}: the transfer was given up after an error on its other way")
                callback(buffer)
                self._open[turn] -= 1
                self._changed.notify_all()

        return call

    def abort(self) -> None:
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()

    def _is_first(self, turn: _Turn) -> bool:
        return not any(count for earlier, count in self._open.items() if earlier < turn)
