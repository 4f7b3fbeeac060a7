"""Where ranks meet: a TCP store that listens on one address of its host only, and gloo connections on that address too.

By itself torch's store listens on every address of the host, and gloo on the one that the host's name resolves to; on a
laptop that is more than loopback, in a container often an address that nobody reaches.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import time
from datetime import timedelta

import torch.distributed as dist

_BACKLOG = 2048
_POLL_S = 0.05
_GLOO_CONNECT_FACTOR = 5  # gloo/transport/tcp/pair.cc waits so many times its timeout for a connection
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface


def open_store(host: str, port: int, *, is_master: bool, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store at `host`, or start it there.

    Raises:
        OSError: The port is taken, or `host` is no address of this machine (master); nobody listens in time (others).
        RuntimeError: Whoever listens is no store, or gives no answer; torch's DistError is one.
    """
    listening = socket.create_server((host, port), backlog=_BACKLOG) if is_master else None
    if not is_master:
        _await_listener(host, port, timeout)
    return dist.TCPStore(
        host,
        port,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach() if listening else None,
    )


def _await_listener(host: str, port: int, timeout: timedelta) -> None:
    """Wait until somebody listens; torch's own client begins anew when its time is up, and takes more than twice as long."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), max(0.001, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine from which it reaches `host`; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address, e.g. "lo" for 127.0.0.1; None when none has it. Linux only."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # an interface without an address
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


def gloo_group(store: dist.Store, rank: int, size: int, address: str, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Connect a gloo group that listens on `address`. Collective: all `size` ranks call it.

    Args:
        timeout: Bound on connecting, of which each wait for one rank's address gets a fifth.

    Raises:
        RuntimeError: A rank does not connect in time.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout / _GLOO_CONNECT_FACTOR
    return dist.ProcessGroupGloo(store, rank, size, options)
