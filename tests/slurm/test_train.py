"""The batch script under a real scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.cli.launch import Launch
from hybridrl.preflight.check import load_checked
from hybridrl.preflight.command import Command
from tests.e2e.runs import CALC, one_rank, read_metrics
from tests.slurm.cluster import SlurmCluster, has_ended, missing_programs, slurm_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}"),
]
GO_ON = ("checkpoint.every_steps=5", "trainer.resume=auto")
SHORT = (
    "trainer.num_steps=2",
    "trainer.eval_every_steps=0",
    "trainer.save_hf_at_end=false",
    "name=run",
    "runs_dir=runs",
)


def submit(cluster: SlurmCluster, num_nodes: int, *overrides: str) -> str:
    chosen = dict(setting.split("=", 1) for setting in (*SHORT, *overrides))
    settings = [f"{key}={value}" for key, value in chosen.items()]
    experiment = load_checked(CALC, settings, Command.TRAIN).config
    return cluster.call(*Launch(num_nodes).command(CALC, settings, experiment))


def test_two_nodes_train_together(tmp_path: Path) -> None:
    with slurm_cluster(tmp_path) as cluster:
        job = submit(cluster, 2, "placement.rollout=rollout", *one_rank())
        state = cluster.wait(job, has_ended, 300)
        log = cluster.log(job)
        assert state["JobState"] == "COMPLETED", log
        assert "Ray has 2 of 2 nodes" in log
        assert [row["step"] for row in read_metrics(tmp_path / "runs" / "run")] == [0, 1]


def test_an_unfit_node_is_excluded_and_the_job_runs_on_the_other(tmp_path: Path) -> None:
    """Also a job that cannot go on, which Slurm does not start over once it trains."""
    prolog = '[[ $SLURMD_NODENAME != n0 ]] || echo "export HYBRIDRL_MIN_SHM_GIB=1000000"'
    with slurm_cluster(tmp_path, prolog) as cluster:
        job = submit(cluster, 1, *one_rank())
        state = cluster.wait(job, has_ended, 300)
        log = cluster.log(job)
        assert state["JobState"] == "COMPLETED" and state["Restarts"] == "1", log
        assert state["ExcNodeList"] == "n0" and state["NodeList"] == "n1"
        assert state["Requeue"] == "0"
        assert "n0: " in log and "GiB free in /dev/shm, expected 1000000" in log


def steps_of(cluster: SlurmCluster) -> list[int]:
    return [int(row["step"]) for row in read_metrics(cluster.folder / "runs" / "run")]


def has_checkpoint(cluster: SlurmCluster) -> bool:
    return any((cluster.folder / "runs" / "run" / "checkpoints").glob("step_*/manifest.json"))


def train_undisturbed(cluster: SlurmCluster, num_steps: int) -> list[dict[str, float]]:
    """Return the metrics of the run that is not stopped, less what tells the time."""
    job = submit(cluster, 1, *one_rank(), f"trainer.num_steps={num_steps}", "name=undisturbed")
    assert cluster.wait(job, has_ended, 400)["JobState"] == "COMPLETED", cluster.log(job)
    return without_times(cluster.folder / "runs" / "undisturbed")


def without_times(folder: Path) -> list[dict[str, float]]:
    return [
        {
            name: value
            for name, value in row.items()
            if "time_s" not in name and "seconds" not in name and "per_s" not in name
        }
        for row in read_metrics(folder)
    ]


def test_before_the_time_limit_a_job_saves_and_goes_on_in_the_queue(tmp_path: Path) -> None:
    """Once there is a checkpoint the limit is brought so near that Slurm announces it at its next look, every 30 seconds."""
    with slurm_cluster(tmp_path) as cluster:
        job = submit(cluster, 1, *one_rank(), *GO_ON, "trainer.num_steps=100")
        state = cluster.wait(job, lambda state: has_checkpoint(cluster), 300)
        hours, minutes, _ = map(int, state["RunTime"].split(":"))
        cluster.call("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 5}")
        cluster.wait(job, lambda state: int(state["Restarts"]) >= 1, 300)
        assert "the same command goes on from the checkpoint after step" in cluster.log(job)
        done = len(steps_of(cluster))
        assert 0 < done < 100
        cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=30")
        assert cluster.wait(job, has_ended, 400)["JobState"] == "COMPLETED", cluster.log(job)
        assert steps_of(cluster) == list(range(100))
        assert without_times(tmp_path / "runs" / "run") == train_undisturbed(cluster, 100)


def test_a_job_whose_node_dies_goes_on_on_another(tmp_path: Path) -> None:
    with slurm_cluster(tmp_path) as cluster:
        job = submit(cluster, 1, *one_rank(), *GO_ON, "trainer.num_steps=30")
        cluster.wait(job, lambda state: has_checkpoint(cluster), 200)
        cluster.kill_node(cluster.state(job)["NodeList"])
        state = cluster.wait(job, has_ended, 400)
        assert state["JobState"] == "COMPLETED" and int(state["Restarts"]) >= 1, cluster.log(job)
        assert steps_of(cluster) == list(range(30))
        assert without_times(tmp_path / "runs" / "run") == train_undisturbed(cluster, 30)
