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

from hybridrl.errors import EngineError, PeerLostError


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of one call on one worker: a value, or what went wrong.

    Attributes:
        error: Type and text of the exception; None when there was none.
        is_peer_lost: Whether it was a :class:`PeerLostError`.
        trace: Its traceback.
        failed_at_s: When it was caught, on the clock that all processes of a host share; tells cause from consequence.
    """

    rank: int
    value: Any = None
    error: str | None = None
    is_peer_lost: bool = False
    trace: str = ""
    failed_at_s: float = 0.0


def encode(value: object) -> bytes:
    """Pickle an argument or a reply."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def decode(payload: bytes) -> Any:
    """Undo :func:`encode`."""
    return pickle.loads(payload)


def values_of(replies: list[bytes], what: str) -> list[Any]:
    """Return the value of each worker's reply, in rank order.

    Raises:
        EngineError: Some workers failed; names each with its error, and ends with the traceback of the first to fail.
        PeerLostError: The same, and all that they say is that their peers failed.
    """
    decoded: list[Reply] = sorted((decode(reply) for reply in replies), key=lambda reply: reply.rank)
    failed = sorted((reply for reply in decoded if reply.error is not None), key=lambda reply: reply.failed_at_s)
    if failed:
        named = "; ".join(f"worker {reply.rank}: {reply.error}" for reply in failed)
        kind = PeerLostError if all(reply.is_peer_lost for reply in failed) else EngineError
        raise kind(
            f"rollout engine: {what} failed on {len(failed)} of {len(decoded)} workers; {named}\n"
            f"worker {failed[0].rank}, the first to fail:\n{failed[0].trace}".rstrip()
        )
    return [reply.value for reply in decoded]
