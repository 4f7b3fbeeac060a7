"""``hybridrl launch FILE --slurm``: check a configuration, then submit it as a Slurm job, or as a chain of jobs.

Everything about the job itself is in ``scripts/slurm/train.sbatch``; this composes its options.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.cli.number import number
from hybridrl.config.choices import Platform
from hybridrl.config.schema import RESUME_AUTO, ExperimentConfig
from hybridrl.errors import ConfigError, EngineError
from hybridrl.planning.pools import count_devices

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "slurm" / "train.sbatch"
SUBMIT_TIMEOUT_S = 60
DEFAULT_STOP_BEFORE_S = 600


@dataclass(frozen=True, slots=True)
class Launch:
    """How to submit a configuration.

    Attributes:
        gpus_per_node: 0 on a cluster of CPUs.
        container: ``pyxis:IMAGE`` or ``apptainer:IMAGE``; none when None.
        num_chained: Jobs that run one after another, each going on where the one before stopped.
        stop_before_s: How long before the time limit the job is told to save and stop.
        options: Further options of sbatch.
    """

    num_nodes: int
    gpus_per_node: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    container: str | None = None
    num_chained: int = 1
    stop_before_s: int = DEFAULT_STOP_BEFORE_S
    options: tuple[str, ...] = ()
    is_dry_run: bool = False

    def _check(self, experiment: ExperimentConfig) -> None:
        problems = []
        num_devices, wanted = self.num_nodes * self.gpus_per_node, count_devices(experiment)
        if experiment.platform is Platform.CUDA and num_devices < wanted:
            problems.append(
                f"--nodes {self.num_nodes}, --gpus-per-node {self.gpus_per_node}: {num_devices} GPUs, the configuration needs {wanted}"
            )
        if self.num_chained > 1 and not experiment.goes_on:
            problems.append(
                f"--chain {self.num_chained}: each job would start over; set checkpoint.every_steps and "
                f"trainer.resume={RESUME_AUTO}"
            )
        if any(option.startswith("--export") for option in self.options):
            problems.append(
                "--sbatch-option --export: would replace what the job's script needs; set variables in the shell instead"
            )
        if not SCRIPT.is_file():
            problems.append(f"{SCRIPT} is missing; launch from a checkout")
        if problems:
            raise ConfigError(problems)

    def command(self, config: Path, overrides: Sequence[str], experiment: ExperimentConfig) -> list[str]:
        """Return the call of sbatch, which prints the number of the job.

        Args:
            config: File of the configuration, relative to the folder of the call.
            overrides: Settings that replace those of the file.
            experiment: What both give.
        """
        named = {"partition": self.partition, "account": self.account, "time": self.time}
        settings = [f"--{name}={value}" for name, value in named.items() if value is not None]
        settings.append(f"--signal=B:USR1@{self.stop_before_s}")
        if self.gpus_per_node:
            settings.append(f"--gpus-per-node={self.gpus_per_node}")
        exported = [f"HYBRIDRL_GOES_ON={int(experiment.goes_on)}"]
        if self.container is not None:
            exported.append(f"HYBRIDRL_CONTAINER={self.container}")
        settings.append(f"--export=ALL,{','.join(exported)}")
        script = [str(SCRIPT), str(config), *overrides]
        return ["sbatch", "--parsable", f"--nodes={self.num_nodes}", *settings, *self.options, *script]

    def submit(self, config: Path, overrides: Sequence[str], experiment: ExperimentConfig) -> int:
        """Print the command when it is a dry run, else submit; each job of a chain waits for the one before to end.

        Raises:
            ConfigError: The job has too few devices, or a chain would start over with each of its jobs.
            EngineError: Slurm is not here, or refuses the job.
        """
        self._check(experiment)
        command = self.command(config, overrides, experiment)
        if self.is_dry_run:
            print(shlex.join(command))
            return 0
        if shutil.which("sbatch") is None:
            raise EngineError(
                "sbatch is not on PATH; call this on a login node of the cluster, or print with --dry-run"
            )
        previous = ""
        for _ in range(self.num_chained):
            waits = [f"--dependency=afterany:{previous}"] if previous else []
            previous = _sbatch([command[0], *waits, *command[1:]])
            print(f"submitted job {previous}; log: hybridrl-{previous}.log")
        return 0


def add_options(command: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    command.add_argument("--slurm", action="store_true", required=True, help="submit to Slurm")
    command.add_argument("--nodes", type=number(int, 1), required=True, help="nodes of the job")
    command.add_argument("--gpus-per-node", type=number(int, 0), default=0, help="GPUs of each node (%(default)s)")
    command.add_argument(
        "--time", help="time limit; with checkpoints and trainer.resume=auto the job goes on in the queue"
    )
    command.add_argument(
        "--stop-before",
        type=number(int, 1),
        default=DEFAULT_STOP_BEFORE_S,
        metavar="SECONDS",
        help="before the time limit, when the job ends the step under way and saves; longer than both take (%(default)s)",
    )
    command.add_argument("--partition")
    command.add_argument("--account")
    command.add_argument("--container", type=_container, metavar="KIND:IMAGE", help="pyxis:IMAGE or apptainer:IMAGE")
    command.add_argument(
        "--chain", type=number(int, 1), default=1, help="jobs that run one after another (%(default)s)"
    )
    command.add_argument("--sbatch-option", action="append", default=[], help="one more option of sbatch; repeatable")
    command.add_argument("--dry-run", action="store_true", help="print the command and do not submit")


def launch_of(parsed: argparse.Namespace) -> Launch:
    """Return what the options ask for."""
    return Launch(
        parsed.nodes,
        parsed.gpus_per_node,
        parsed.time,
        parsed.partition,
        parsed.account,
        parsed.container,
        parsed.chain,
        parsed.stop_before,
        tuple(parsed.sbatch_option),
        parsed.dry_run,
    )


def _container(text: str) -> str:
    kind, _, image = text.partition(":")
    if kind not in ("pyxis", "apptainer") or not image or "," in image:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected pyxis:IMAGE or apptainer:IMAGE")
    return text


def _sbatch(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SUBMIT_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as e:
        raise EngineError(f"sbatch refuses the job: {e.stderr.strip()}") from e
    except subprocess.TimeoutExpired as e:
        raise EngineError(f"sbatch did not answer within {SUBMIT_TIMEOUT_S} s") from e
    return done.stdout.strip().split(";")[0]
