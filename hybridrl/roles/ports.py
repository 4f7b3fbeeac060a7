"""Free TCP ports."""

from __future__ import annotations

import socket


def free_port(host: str = "") -> int:
    """Return a TCP port of this machine that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
