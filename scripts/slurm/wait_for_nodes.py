"""Wait until a Ray cluster has all of its nodes.

Called by ``train.sbatch`` as ``wait_for_nodes.py ADDRESS NUM_NODES TIMEOUT_S RAY_PID``. Exits with 0 when the cluster at
ADDRESS has NUM_NODES living nodes, and with a message when that takes longer than TIMEOUT_S or when the process RAY_PID,
which holds the cluster up, is gone.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import ray


def main(address: str, num_nodes: int, timeout_s: float, ray_pid: int) -> None:
    """Wait, or exit with a message that says what is missing."""
    deadline = time.monotonic() + timeout_s
    while not _accepts_connections(address):
        _check(deadline, ray_pid, f"no Ray head answers at {address}")
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    while (num_alive := sum(node["Alive"] for node in ray.nodes())) < num_nodes:
        _check(deadline, ray_pid, f"{num_alive} of {num_nodes} nodes have joined {address}")
    print(f"Ray has {num_alive} of {num_nodes} nodes: {ray.cluster_resources()}", flush=True)


def _accepts_connections(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True


def _check(deadline: float, ray_pid: int, state: str) -> None:
    """Sleep a moment, unless there is nothing to wait for any more."""
    try:
        os.kill(ray_pid, 0)
    except ProcessLookupError:
        sys.exit(f"{state}, and the Ray processes have ended")
    if time.monotonic() > deadline:
        sys.exit(f"{state} within the time given")
    time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
