"""What the batch script does with signals and exit codes, with programs that pass for Slurm, Ray and the trainer; a real one is in tests/slurm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hybridrl.cli.launch import SCRIPT

REQUEUE = 75
SCONTROL = """
echo "$*" >> calls
case "$*" in
  "show job"*) echo "   ReqNodeList=(null) ExcNodeList=(null)"; echo "   Command=$CHECKOUT/scripts/slurm/train.sbatch" ;;
  "show hostnames"*) echo n0 ;;
  "show node"*) echo "NodeName=n0 NodeAddr=127.0.0.1 Version=1" ;;
  requeue*) exit "${REQUEUE_STATUS:-0}" ;;
esac
"""
SRUN = 'while [[ $1 == --* ]]; do shift; done; exec "$@"'
RAY = "touch ray_is_up; exec sleep 60"
WAIT_FOR_RAY = "until [[ -e ray_is_up ]]; do sleep 0.02; done"
# Once it sleeps, it waits for the program that it has started.
SIGNAL_THE_SCRIPT = "until [[ $(</proc/$PPID/stat) == *') S '* ]]; do sleep 0.02; done; kill -USR1 $PPID"
SAVES_WHEN_SIGNALLED = f"trap 'exit 75' USR1; {SIGNAL_THE_SCRIPT}; while true; do sleep 0.02; done"


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run_job(folder: Path, *, trainer: str = "", waiter: str = "", **environment: str) -> tuple[int, list[str], str]:
    """Run the script as a job of one node.

    Args:
        trainer: Bash that passes for ``hybridrl train``.
        waiter: Bash that passes for ``wait_for_nodes.py``, once Ray is up.

    Returns:
        Exit code, calls of scontrol that change something, and what the script printed.
    """
    checkout = folder / "checkout"
    shutil.copytree(SCRIPT.parent, checkout / "scripts" / "slurm")
    (folder / "bin").mkdir()
    programs = {"scontrol": SCONTROL, "srun": SRUN, "ray": RAY, "hybridrl": trainer}
    for name, text in {**programs, "python": f"{WAIT_FOR_RAY}; {waiter}"}.items():
        program(folder / "bin", name, text)
    (folder / "run.yaml").touch()
    job = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CHECKOUT": str(checkout),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n0",
        "SLURMD_NODENAME": "n0",
        "SLURM_NODEID": "0",
        "HYBRIDRL_MIN_SHM_GIB": "0",
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), "run.yaml"],
        cwd=folder, env=os.environ | job | environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    calls = (folder / "calls").read_text().splitlines()
    return done.returncode, [call for call in calls if not call.startswith("show")], done.stdout + done.stderr


def test_the_time_limit_while_ray_starts_puts_the_job_back(tmp_path: Path) -> None:
    code, calls, output = run_job(tmp_path, waiter=f"{SIGNAL_THE_SCRIPT}; exec sleep 60", HYBRIDRL_GOES_ON="0")
    assert (code, calls) == (REQUEUE, ["requeue 7"]), output
    assert "the time limit is near and training has not begun" in output
    assert "Ray did not start" not in output


def test_at_the_time_limit_the_trainer_saves_and_the_job_goes_back(tmp_path: Path) -> None:
    assert run_job(tmp_path, trainer=SAVES_WHEN_SIGNALLED)[:2] == (REQUEUE, ["requeue 7"])


@pytest.mark.parametrize(
    ("trainer", "after_wait"),
    [
        ("exit 3", "kill -USR1 $$"),
        (f"trap '' USR1; {SIGNAL_THE_SCRIPT}; sleep 0.1; exit 3", "sleep 0.3"),
    ],
    ids=["the signal comes after the end", "the end comes after the signal"],
)
def test_a_trainer_that_ends_as_the_signal_comes_keeps_its_exit_code(
    tmp_path: Path, trainer: str, after_wait: str
) -> None:
    """Something happens right after the script's first `wait` for the trainer has returned, before it acts on that."""
    hook = tmp_path / "hook.sh"
    hook.write_text(
        'wait() { builtin wait "$@"; local status=$?; '
        f"if [[ -e trained && -z ${{once:-}} ]]; then once=1; {after_wait}; fi; return $status; }}\n"
    )
    code, calls, output = run_job(tmp_path, trainer=f"touch trained; {trainer}", BASH_ENV=str(hook))
    assert (code, calls) == (3, []), output


@pytest.mark.parametrize(("goes_on", "expected"), [("1", REQUEUE), ("0", 128 + signal.SIGUSR1)])
def test_a_trainer_that_did_not_listen_yet_has_lost_nothing_if_its_run_goes_on(
    tmp_path: Path, goes_on: str, expected: int
) -> None:
    dies = f"{SIGNAL_THE_SCRIPT}; exec sleep 60"
    assert run_job(tmp_path, trainer=dies, HYBRIDRL_GOES_ON=goes_on)[0] == expected


@pytest.mark.parametrize(("goes_on", "calls"), [("1", []), ("0", ["update JobId=7 Requeue=0"])])
def test_a_run_that_cannot_go_on_is_not_started_over_once_it_trains(
    tmp_path: Path, goes_on: str, calls: list[str]
) -> None:
    assert run_job(tmp_path, trainer="exit 1", HYBRIDRL_GOES_ON=goes_on)[:2] == (1, calls)


def test_an_unfit_node_is_named_with_how_to_leave_it_out_when_slurm_does_not_requeue(tmp_path: Path) -> None:
    code, calls, output = run_job(tmp_path, HYBRIDRL_MIN_SHM_GIB="1000000", REQUEUE_STATUS="1")
    assert (code, calls) == (1, ["requeue 7"])
    assert "n0: " in output
    assert "Slurm refuses to put the job back into the queue; submit it again with --exclude=n0" in output


def test_an_unfit_node_is_left_out_of_a_run_that_cannot_go_on(tmp_path: Path) -> None:
    code, calls, output = run_job(tmp_path, HYBRIDRL_MIN_SHM_GIB="1000000", HYBRIDRL_GOES_ON="0")
    assert (code, calls) == (REQUEUE, ["requeue 7", "update JobId=7 ExcNodeList=n0"]), output
