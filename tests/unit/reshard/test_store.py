"""The store and gloo listen on the address that they are told, and nowhere else."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.reshard.transports.store import address_towards, gloo_group, interface_of, open_store
from hybridrl.roles.ports import free_port

TIMEOUT = timedelta(seconds=5)


def _listening() -> set[str]:
    """Return what this process listens on, as ``address:port`` in the kernel's hex."""
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    targets = [descriptor.readlink() for descriptor in Path("/proc/self/fd").iterdir() if descriptor.is_symlink()]
    own = {target.name for target in targets}
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def test_store_and_gloo_listen_on_loopback_only() -> None:
    before, port = _listening(), free_port("127.0.0.1")
    store = open_store("127.0.0.1", port, is_master=True, timeout=TIMEOUT)
    group = gloo_group(store, 0, 1, address_towards("127.0.0.1", port), TIMEOUT)
    opened = _listening() - before
    assert f"0100007F:{port:04X}" in opened
    assert all(address.startswith("0100007F:") for address in opened), opened
    del group


def test_a_client_reads_what_the_master_holds() -> None:
    port = free_port("127.0.0.1")
    store = open_store("127.0.0.1", port, is_master=True, timeout=TIMEOUT)
    store.set("key", "value")
    assert open_store("127.0.0.1", port, is_master=False, timeout=TIMEOUT).get("key") == b"value"


def test_a_taken_port_is_an_error() -> None:
    port = free_port("127.0.0.1")
    store = open_store("127.0.0.1", port, is_master=True, timeout=TIMEOUT)
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", port, is_master=True, timeout=TIMEOUT)
    del store


def test_a_client_gives_up_when_its_time_is_up() -> None:
    start = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        open_store("127.0.0.1", free_port("127.0.0.1"), is_master=False, timeout=timedelta(seconds=2))
    assert 2.0 <= time.monotonic() - start < 3.5, "torch's own client tries anew, for up to 4.7 s"


def test_a_message_may_take_longer_than_connecting() -> None:
    store, address = dist.HashStore(), "127.0.0.1"
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(gloo_group, store, rank, 2, address, timedelta(seconds=10)) for rank in range(2)]
        groups: list[Any] = [rank.result() for rank in ranks]
    buffer = torch.zeros(1)
    work = groups[1].recv([buffer], 0, 0)
    time.sleep(2.5)  # gloo's own timeout is a fifth of 10 s
    groups[0].send([torch.ones(1)], 1, 0).wait()
    assert work.wait(timedelta(seconds=10))
    assert buffer.item() == 1.0


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
