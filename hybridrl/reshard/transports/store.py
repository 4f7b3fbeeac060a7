"""Where ranks meet: a TCP store that listens on one address of its host only, and gloo connections on that address too.

By itself torch's store listens on every address of the host, and gloo on the one that the host's name resolves to; on a
laptop that is more than loopback, in a container often an address that nobody reaches.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from datetime import timedelta

import torch.distributed as dist

_BACKLOG = 2048
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface


def open_store(host: str, port: int, *, is_master: bool, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store at `host`, or start it there.

    Raises:
        OSError: The port is taken, or `host` is no address of this machine (master).
        RuntimeError: Nobody answers in time; torch's DistError is one.
    """
    listening = socket.create_server((host, port), backlog=_BACKLOG) if is_master else None
    return dist.TCPStore(
        host,
        port,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach() if listening else None,
    )


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
    """Connect a gloo group that listens on `address`. Collective: all `size` ranks call it."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)
