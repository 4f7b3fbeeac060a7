"""What libraries say when the other end of a connection is gone or gives no answer; they have no error types for it.

Whatever else goes wrong, such as a device that is out of memory, is the code's own and would come again.
"""

from __future__ import annotations

_MARKS = (
    # the operating system
    "Connection refused",
    "Connection reset by peer",
    "Connection timed out",
    "Broken pipe",
    "No route to host",
    # gloo
    "Connection closed by peer",
    "Connect timeout",
    "timed out connecting",
    "Timed out waiting",
    "Application timeout caused pair closure",
    # torch's store
    "wait timeout after",
    "client socket has timed out",
    "Connection was likely closed",
    "Socket Timeout",
    # NCCL
    "ncclRemoteError",
    "Watchdog caught collective operation timeout",
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether a library's error says that it is the other end that failed, or that the time to wait for it is up."""
    return isinstance(error, (RuntimeError, OSError)) and any(mark in str(error) for mark in _MARKS)
