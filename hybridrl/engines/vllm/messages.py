"""What crosses between the engine's front end and its worker processes.

vLLM's RPC carries plain bytes safely, and objects only with a process-wide switch that makes every message a pickle. So that switch
stays off: calls of ours carry one pickled argument as bytes and return one pickled :class:`Reply` as bytes.

Trust boundary: both ends are processes of one replica, started by the same user on the same host, which talk through sockets and
shared memory that vLLM keeps local to that host. Never pass bytes from elsewhere to :func:`decode`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import EngineError


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of one call on one worker: a value, or what went wrong."""

    rank: int
    value: Any = None
    error: str | None = None


def encode(value: object) -> bytes:
    """Pickle an argument or a reply."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def decode(payload: bytes) -> Any:
    """Undo :func:`encode`."""
    return pickle.loads(payload)


def values_of(replies: list[bytes], what: str) -> list[Any]:
    """Return the value of each worker's reply, in rank order.

    Raises:
        EngineError: Some workers failed; names each with its error.
    """
    decoded: list[Reply] = sorted((decode(reply) for reply in replies), key=lambda reply: reply.rank)
    failures = [f"worker {reply.rank}: {reply.error}" for reply in decoded if reply.error is not None]
    if failures:
        raise EngineError(
            f"rollout engine: {what} failed on {len(failures)} of {len(decoded)} workers; " + "; ".join(failures)
        )
    return [reply.value for reply in decoded]
