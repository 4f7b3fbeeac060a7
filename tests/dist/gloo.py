"""Runs a function on N ranks, each a fresh process, in bounded time.

Processes are forked from one server that has imported torch and Megatron already, so a rank starts in a fraction of a
second. When a rank fails, all are killed and its own traceback is raised, not that of the ranks which lost their peer.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.dist.megatron_ranks"])


class RankError(AssertionError):
    """The first rank that failed, with its traceback."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """Call ``function(rank, init_method, *args)`` on every rank and return the results in rank order.

    Args:
        function: A module-level function; arguments and result must be picklable.
        timeout_s: Time for all ranks together, in seconds.

    Raises:
        RankError: With the traceback of the first failing rank, or the ranks that did not finish in time.
    """
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    deadline = time.monotonic() + timeout_s
    # Plain pickle: multiprocessing's own would pass tensors as file descriptors, which die with their process.
    job = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        init_method = f"file://{folder}/store"
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _CONTEXT.Process(target=_run_rank, args=(pipes[rank][1], job, rank, init_method), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            for _, writer in pipes:
                writer.close()
            return _collect([reader for reader, _ in pipes], deadline, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(readers: list[Connection], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    pending = dict(enumerate(readers))
    while pending:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(pending)} did not finish within {timeout_s:.0f} s")
        for rank in [rank for rank, reader in pending.items() if reader in ready]:
            try:
                has_succeeded, value = pickle.loads(pending.pop(rank).recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not has_succeeded:
                raise RankError(f"rank {rank} failed first:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(readers))]


def _run_rank(writer: Connection, job: bytes, rank: int, init_method: str) -> None:
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(job)
        answer = pickle.dumps((True, function(rank, init_method, *args)))
    except BaseException:  # noqa: BLE001 - the process boundary: the parent raises what it reads
        answer = pickle.dumps((False, traceback.format_exc()))
    try:
        writer.send_bytes(answer)
    finally:
        writer.close()
    os._exit(0)
