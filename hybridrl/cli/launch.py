"""``hybridrl launch FILE --slurm``: check a configuration, then submit it as a Slurm job, or as a chain of jobs.

Everything about the job itself is in ``scripts/slurm/train.sbatch``; this composes its options.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.errors import ConfigError, EngineError

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "slurm" / "train.sbatch"
SUBMIT_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """What to submit.

    Attributes:
        config: Relative to the folder that the job runs in.
        gpus_per_node: 0 on a cluster of CPUs.
        container: ``pyxis:IMAGE`` or ``apptainer:IMAGE``; none when None.
        num_chained: Jobs that run one after another, each resuming where the one before stopped.
        options: Further options of sbatch.
    """

    config: Path
    overrides: tuple[str, ...]
    num_nodes: int
    gpus_per_node: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    container: str | None = None
    num_chained: int = 1
    options: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return the call of sbatch; it prints the number of the job."""
        named = {"partition": self.partition, "account": self.account, "time": self.time}
        settings = [f"--{name}={value}" for name, value in named.items() if value is not None]
        if self.gpus_per_node:
            settings.append(f"--gpus-per-node={self.gpus_per_node}")
        if self.container is not None:
            settings.append(f"--export=ALL,HYBRIDRL_CONTAINER={self.container}")
        script = [str(SCRIPT), str(self.config), *self.overrides]
        return ["sbatch", "--parsable", f"--nodes={self.num_nodes}", *settings, *self.options, *script]


def add_options(command: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    command.add_argument("--slurm", action="store_true", required=True, help="submit to Slurm")
    command.add_argument("--nodes", type=int, required=True, help="nodes of the job")
    command.add_argument("--gpus-per-node", type=int, default=0, help="GPUs of each node (%(default)s)")
    command.add_argument("--time", help="time limit; the job saves a checkpoint before it and goes back into the queue")
    command.add_argument("--partition")
    command.add_argument("--account")
    command.add_argument("--container", metavar="KIND:IMAGE", help="pyxis:IMAGE or apptainer:IMAGE")
    command.add_argument("--chain", type=int, default=1, help="jobs that run one after another (%(default)s)")
    command.add_argument("--sbatch-option", action="append", default=[], help="one more option of sbatch; repeatable")
    command.add_argument("--dry-run", action="store_true", help="print the command and do not submit")


def job_of(parsed: argparse.Namespace) -> SlurmJob:
    """Return the job that the options ask for.

    Raises:
        ConfigError: An option is out of range.
    """
    problems = []
    for option, value, least in (
        ("--nodes", parsed.nodes, 1),
        ("--chain", parsed.chain, 1),
        ("--gpus-per-node", parsed.gpus_per_node, 0),
    ):
        if value < least:
            problems.append(f"{option}: got {value}, expected at least {least}")
    if parsed.container is not None and not parsed.container.startswith(("pyxis:", "apptainer:")):
        problems.append(f"--container: got {parsed.container!r}, expected pyxis:IMAGE or apptainer:IMAGE")
    if problems:
        raise ConfigError(problems)
    return SlurmJob(
        parsed.file,
        tuple(parsed.overrides),
        parsed.nodes,
        parsed.gpus_per_node,
        parsed.time,
        parsed.partition,
        parsed.account,
        parsed.container,
        parsed.chain,
        tuple(parsed.sbatch_option),
    )


def submit(job: SlurmJob, *, is_dry_run: bool) -> int:
    """Print the command, and submit it unless told otherwise; each job of a chain waits for the one before to end.

    Raises:
        EngineError: Slurm is not here, or refuses the job.
    """
    command = job.command()
    if is_dry_run:
        print(shlex.join(command))
        return 0
    if shutil.which("sbatch") is None:
        raise EngineError("sbatch is not on PATH; call this on a login node of the cluster, or print with --dry-run")
    previous = ""
    for _ in range(job.num_chained):
        previous = _sbatch(command[:1] + ([f"--dependency=afterany:{previous}"] if previous else []) + command[1:])
        print(f"submitted job {previous}; log: hybridrl-{previous}.log")
    return 0


def _sbatch(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SUBMIT_TIMEOUT_S, env=os.environ, check=True
        )
    except subprocess.CalledProcessError as e:
        raise EngineError(f"sbatch refuses the job: {e.stderr.strip()}") from e
    except subprocess.TimeoutExpired as e:
        raise EngineError(f"sbatch did not answer within {SUBMIT_TIMEOUT_S} s") from e
    return done.stdout.strip().split(";")[0]
