"""Real processes that are looked at from outside: one at work, one that holds the GIL, one that is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hybridrl.observability import stacks
from hybridrl.observability.heartbeat import HEARTBEAT, Identity, read_page
from hybridrl.observability.stacks import Frame, ProcessReport, parse_stacks
from tests.processes import still_running, stop

SESSION = "test-of-stacks"
CHILD = f"""
import ctypes, sys, threading, time
from hybridrl.observability.heartbeat import HEARTBEAT, Identity

def sleeping():
    print(flush=True)
    time.sleep(100)

def holding_the_gil():
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    print(flush=True)
    library.pthread_mutex_lock(mutex)

HEARTBEAT.advance()
HEARTBEAT.show(Identity({SESSION!r}, sys.argv[1], 3))
HEARTBEAT.advance()
HEARTBEAT.doing("sample 1")
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
sleeping() if sys.argv[1] != "greedy" else holding_the_gil()
"""


@pytest.fixture(scope="module")
def reports() -> Iterator[dict[str, ProcessReport]]:
    """What is seen of the three; they are ended after."""
    command = [sys.executable, "-c", CHILD]
    children = {
        role: subprocess.Popen([*command, role], stdout=subprocess.PIPE) for role in ("sleepy", "greedy", "stopped")
    }
    for child in children.values():
        assert child.stdout is not None
        child.stdout.readline()
    stop(children["stopped"].pid)
    assert sorted(stacks.progress(SESSION)) == sorted(child.pid for child in children.values())
    assert set(stacks.progress(SESSION).values()) == {2}
    assert stacks.progress("another") == {}
    started = time.monotonic()
    found = stacks.collect(SESSION, 5.0)
    assert time.monotonic() - started < 5.0, "a stopped process is not waited for"
    yield {report.identity.role: report for report in found}
    stacks.kill(SESSION)
    assert {role: child.wait(5) for role, child in children.items()} == dict.fromkeys(children, -signal.SIGKILL)


def test_every_process_is_found_with_what_it_says_of_itself(reports: dict[str, ProcessReport]) -> None:
    assert sorted(reports) == ["greedy", "sleepy", "stopped"]
    assert str(reports["greedy"].identity) == "greedy rank 3"
    assert {report.doing for report in reports.values()} == {"sample 1"}


@pytest.mark.parametrize(("role", "function"), [("sleepy", "sleeping"), ("greedy", "holding_the_gil")])
def test_the_stacks_are_of_all_threads_and_the_main_one_is_last(
    reports: dict[str, ProcessReport], role: str, function: str
) -> None:
    found = reports[role].stacks
    assert found is not None and len(found) == 2
    assert [frame.function for frame in found[-1]] == [function, "<module>"]
    assert found[0][0] == Frame(found[0][0].file, found[0][0].line, "run", "self._target(*self._args, **self._kwargs)")


def test_a_stopped_process_has_a_state_and_no_stacks(reports: dict[str, ProcessReport]) -> None:
    assert (reports["stopped"].state, reports["stopped"].stacks) == (psutil.STATUS_STOPPED, None)


def test_a_stopped_child_that_shows_no_heartbeat_is_reported_and_ended_with_its_parent() -> None:
    code = f"""
import subprocess, time
from hybridrl.observability.heartbeat import HEARTBEAT, Identity
from tests.processes import stop
child = subprocess.Popen(["sleep", "100"])
stop(child.pid)
HEARTBEAT.show(Identity({SESSION!r} + "-2", "rollout", 0))
print(child.pid, flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        found = {str(report.identity): report.state for report in stacks.collect(f"{SESSION}-2", 5.0)}
        stacks.kill(f"{SESSION}-2")
    assert found == {
        "rollout rank 0": psutil.STATUS_SLEEPING,
        "rollout rank 0's child sleep": psutil.STATUS_STOPPED,
    }
    assert not still_running([child], within_s=5.0)


def test_what_is_hidden_is_not_found_and_counting_goes_on() -> None:
    HEARTBEAT.show(Identity(f"{SESSION}-3", "self"))
    found = stacks.collect(f"{SESSION}-3", 5.0)
    HEARTBEAT.hide()
    assert "self" in {str(report.identity) for report in found}
    before = HEARTBEAT.count
    HEARTBEAT.advance()
    assert HEARTBEAT.count == before + 1
    assert stacks.progress(f"{SESSION}-3") == {}


def test_a_process_that_has_just_begun_to_show_itself_has_done_nothing_yet() -> None:
    identity = Identity(f"{SESSION}-4", "young")
    file = os.memfd_create(identity.file_name())
    try:
        assert stacks.progress(f"{SESSION}-4") == {os.getpid(): 0}
    finally:
        os.close(file)


def test_a_process_whose_name_is_cut_inside_a_character_is_looked_at_as_any_other() -> None:
    code = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"stage\\xc3")  # PR_SET_NAME
print(flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        stop(child.pid)
        HEARTBEAT.show(Identity(f"{SESSION}-5", "self"))
        reports = {report.pid: report.state for report in stacks.collect(f"{SESSION}-5", 5.0)}
        HEARTBEAT.hide()
        name = Path(f"/proc/{child.pid}/stat").read_bytes()
        child.kill()
    assert b"stage\xc3" in name and reports[child.pid] == psutil.STATUS_STOPPED


def test_file_names_and_pages_are_read_back() -> None:
    for identity in (Identity("s", "actor+critic", 7, "vLLM worker 1"), Identity("s", "controller")):
        assert Identity.parse(identity.file_name()) == identity
    assert Identity.parse("hybridrl-something") is None
    assert read_page(b"\x05" + bytes(7) + b"text" + bytes(100)) == (5, "text")


def test_what_is_no_frame_is_left_out() -> None:
    assert parse_stacks("Fatal Python error\n") == ()
    text = 'Current thread 0x1 (most recent call first):\n  File "/a b.py", line 3 in f\n  ...\n'
    assert parse_stacks(text) == ((Frame("/a b.py", 3, "f"),),)
