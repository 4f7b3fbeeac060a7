"""Programs that attack the machine are contained, whatever they try, and leave nothing behind."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from hybridrl.rewards.sandbox.program import Limits, Outcome, ProgramResult, SandboxError, run_program

LIMITS = Limits(timeout_s=2.0, memory_mib=256, num_processes=8, file_mib=2, output_kib=64)


def run(source: str, stdin: str = "", limits: Limits = LIMITS) -> ProgramResult:
    try:
        return run_program(source, stdin, limits)
    except SandboxError as e:
        pytest.skip(f"this machine allows no sandbox: {e}")


def is_gone(seconds: float, mark: str) -> bool:
    """Return whether no process has `mark` on its command line, after waiting for its end."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        commands = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                commands.append(path.read_bytes())
            except OSError:
                continue
        if not any(mark.encode() in command for command in commands):
            return True
        time.sleep(0.05)
    return False


def test_a_program_reads_prints_and_exits() -> None:
    assert run("print(input()[::-1])", "abc\n") == ProgramResult(Outcome.EXITED, 0, b"cba\n")
    assert run("raise SystemExit(3)").exit_code == 3


def test_a_fork_bomb_ends_at_its_time_and_the_next_program_runs() -> None:
    started = time.monotonic()
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert run(bomb).outcome is Outcome.TIMEOUT
    assert time.monotonic() - started < 15
    assert run("print(1)").output == b"1\n"


def test_processes_are_limited() -> None:
    source = "import os, time\nn = 0\ntry:\n  while os.fork(): n += 1\nexcept OSError: print(n)\nelse: time.sleep(9)"
    assert int(run(source).output) < LIMITS.num_processes


def test_a_memory_hog_fails_to_allocate() -> None:
    assert run("try: x = bytearray(1 << 30)\nexcept MemoryError: print('no')").output == b"no\n"
    assert run("x = []\nwhile True: x.append(bytearray(1 << 20))").exit_code == 1


def test_an_endless_loop_ends_at_its_time() -> None:
    started = time.monotonic()
    assert run("while True: pass").outcome is Outcome.TIMEOUT
    assert 1.9 < time.monotonic() - started < 15


def test_a_process_that_leaves_its_session_is_killed() -> None:
    mark = f"mark-{os.getpid()}"
    source = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    os.close(1)
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)", "{mark}"])
import time
time.sleep(0.3)
print("done")
"""
    assert run(source).output == b"done\n"
    assert is_gone(5.0, mark)


@pytest.mark.parametrize("address", ["('1.1.1.1', 53)", "('127.0.0.1', PORT)"])
def test_there_is_no_network(address: str) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address.replace("PORT", str(server.getsockname()[1]))
        source = f"import socket\ntry: socket.create_connection({address}, 1)\nexcept OSError as e: print(e.strerror)"
        assert run(source).output == b"Network is unreachable\n"


def test_writes_outside_its_folder_fail_and_inside_are_bounded(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    places = [f"{tmp_path}/x", "/tmp/hybridrl-x", "/dev/shm/hybridrl-x", "/hybridrl-x", "../x"]
    source = f"""
for place in {places} + ["x"]:
    try:
        open(place, "w").write("x"); print("wrote", place)
    except OSError: pass
try:
    with open("big", "wb") as f: f.write(bytes(1 << 22))
except OSError as e: print(e.strerror)
try:
    for i in range(100): open(f"part{{i}}", "wb").write(bytes(1 << 20))
except OSError as e: print(e.strerror)
"""
    assert run(source).output.decode().splitlines() == ["wrote x", "File too large", "No space left on device"]
    assert not any(Path(place).exists() for place in places[:4])


def test_huge_output_is_cut_off() -> None:
    result = run("while True: print('x' * 1000)")
    assert (result.outcome, len(result.output)) == (Outcome.TOO_MUCH_OUTPUT, 64 << 10)


def test_nothing_of_the_caller_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    source = "import os\nprint(sorted(os.environ), os.getppid(), [p for p in os.listdir('/proc') if p.isdigit()])"
    printed = run(source).output.decode()
    assert "SECRET" not in printed
    assert f"'{os.getpid()}'" not in printed
    assert run("print(sorted(__import__('os').listdir('/proc/self/fd')))").output == b"['0', '1', '2', '3']\n"


def test_no_folder_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setattr("tempfile.tempdir", folder)
        assert run("open('x', 'w').write('x')").exit_code == 0
        assert list(Path(folder).iterdir()) == []


def test_a_folder_that_programs_may_not_enter_is_no_failure_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if os.getuid() == 0:
        with pytest.raises(SandboxError):
            run_program("print(1)", "", LIMITS)
