"""Free TCP ports."""

from __future__ import annotations

import socket


def free_port(host: str) -> int:
    """Return a TCP port that nobody listens on right now at `host`, an address of this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
