"""A real Slurm on this machine: munged, slurmctld and two slurmd that pass for nodes, all ended with the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from hybridrl.roles.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
NODES = ("n0", "n1")
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/task_prolog.sh
SelectType=select/cons_tres
SchedulerType=sched/builtin
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=10
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Return the programs that are not here; none when the tests can run."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    """A cluster that is up.

    Attributes:
        folder: Holds its configuration, state and logs.
        environment: What a command needs to talk to it.
    """

    folder: Path
    environment: dict[str, str]

    def call(self, *command: str) -> str:
        """Run a command of Slurm and return what it prints."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False, cwd=self.folder
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """Return what ``scontrol show job`` says."""
        text = self.call("scontrol", "show", "job", "-o", job)
        return dict(field.split("=", 1) for field in text.split() if "=" in field)

    def wait(self, job: str, condition: Callable[[dict[str, str]], bool], timeout_s: float) -> dict[str, str]:
        """Wait until the job's state fulfils a condition; a job that is done will not any more."""
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.state(job)
            if condition(state):
                return state
            is_pending = time.monotonic() < deadline and not has_ended(state)
            assert is_pending, f"job {job} is {state['JobState']}: {state}\n{self.log(job)}"
            time.sleep(0.5)

    def log(self, job: str) -> str:
        """Return what the job has written."""
        path = self.folder / f"hybridrl-{job}.log"
        return path.read_text() if path.exists() else ""

    def kill_node(self, name: str) -> None:
        """Kill a node that runs the only job: its daemon and the guards of its steps first, so that nobody tells the end of the rest."""
        daemon = psutil.Process(int((self.folder / f"slurmd-{name}.pid").read_text()))
        guards = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "slurmstepd"]
        for process in [daemon, *guards, *_of_steps(name)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def has_ended(state: dict[str, str]) -> bool:
    """Whether the job is done, one way or the other."""
    return state["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@contextlib.contextmanager
def slurm_cluster(folder: Path, task_prolog: str = "") -> Iterator[SlurmCluster]:
    """Start a cluster of two nodes.

    Args:
        task_prolog: Lines of a shell script that Slurm runs before each task.
    """
    ports = [free_port("127.0.0.1") for _ in range(3)]
    host = socket.gethostname().split(".")[0]
    lines = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000 State=UNKNOWN"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    config = folder / "slurm.conf"
    config.write_text(
        _CONFIG.format(host=host, port=ports[0], folder=folder, nodes="\n".join(lines), names=",".join(NODES))
    )
    prolog = folder / "task_prolog.sh"
    prolog.write_text(f"#!/bin/bash\n{task_prolog}\n")
    prolog.chmod(0o755)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    environment = os.environ | {"SLURM_CONF": str(config)}
    files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log",
             "seed-file": "munge.seed"}  # fmt: skip
    munged = ["munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in files.items())]
    daemons = [munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    running: list[subprocess.Popen[bytes]] = []
    cluster = SlurmCluster(folder, environment)
    try:
        for number, command in enumerate(daemons):
            log = (folder / f"daemon-{number}.log").open("wb")
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
            time.sleep(0.5)
        _wait_until_idle(cluster)
        yield cluster
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            cluster.call("scancel", "--user=root", "--signal=KILL", "--full")
        for node in NODES:
            for process in _of_steps(node):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for daemon in reversed(running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


def _wait_until_idle(cluster: SlurmCluster) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(AssertionError):
            if cluster.call("sinfo", "-h", "-o", "%T %D") == f"idle {len(NODES)}":
                return
        assert time.monotonic() < deadline, "Slurm did not start"
        time.sleep(0.5)


def _of_steps(node: str) -> list[psutil.Process]:
    """Return the processes of all job steps of a node: those that Slurm has given its name."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURMD_NODENAME") == node:
                found.append(process)
    return found
