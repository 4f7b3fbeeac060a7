"""The processes of a rank that was killed are gone when its successor starts; real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from hybridrl.roles.descendants import Descent, end_descendants
from tests.processes import is_running

LEADER = """
import subprocess, sys, time
from hybridrl.roles.descendants import lead_descendants
lead_descendants("here")
child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def orphan() -> Iterator[tuple[Descent, psutil.Process]]:
    """A process group whose leader was killed, and the child that it left."""
    leader = subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    child = psutil.Process(int(leader.stdout.readline()))
    leader.kill()
    leader.wait()
    yield Descent("here", leader.pid), child
    with contextlib.suppress(psutil.NoSuchProcess):
        child.kill()


def test_what_does_not_end_in_time_is_killed(orphan: tuple[Descent, psutil.Process]) -> None:
    descent, child = orphan
    assert os.getpgid(child.pid) == descent.group != os.getpgid(0)
    end_descendants([descent], "here", grace_s=0.3)
    assert not is_running(child.pid)


def test_a_group_of_another_node_is_left_alone(orphan: tuple[Descent, psutil.Process]) -> None:
    descent, child = orphan
    end_descendants([descent], "elsewhere", grace_s=0.0)
    assert is_running(child.pid)
    child.send_signal(signal.SIGKILL)
    end_descendants([descent], "here", grace_s=60.0)
    assert not is_running(child.pid)
