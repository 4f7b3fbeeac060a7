"""The batch script under a real scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.cli.launch import Launch
from tests.e2e.runs import CALC, one_rank, read_metrics
from tests.slurm.cluster import SlurmCluster, has_ended, missing_programs, slurm_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}"),
]
SHORT = (
    "trainer.num_steps=2",
    "trainer.eval_every_steps=0",
    "trainer.save_hf_at_end=false",
    "name=run",
    "runs_dir=runs",
)


def submit(cluster: SlurmCluster, num_nodes: int, *overrides: str, options: tuple[str, ...] = ()) -> str:
    return cluster.call(*Launch(num_nodes, options=options).command(CALC, (*SHORT, *overrides)))


def test_two_nodes_train_together(tmp_path: Path) -> None:
    with slurm_cluster(tmp_path) as cluster:
        job = submit(cluster, 2, "placement=split", *one_rank())
        state = cluster.wait(job, has_ended, 300)
        log = cluster.log(job)
        assert state["JobState"] == "COMPLETED", log
        assert "Ray has 2 of 2 nodes" in log
        assert [row["step"] for row in read_metrics(tmp_path / "runs" / "run")] == [0, 1]


def test_an_unfit_node_is_excluded_and_the_job_runs_on_the_other(tmp_path: Path) -> None:
    prolog = '[[ $SLURMD_NODENAME != n0 ]] || echo "export HYBRIDRL_MIN_SHM_GIB=1000000"'
    with slurm_cluster(tmp_path, prolog) as cluster:
        job = submit(cluster, 1, *one_rank())
        state = cluster.wait(job, has_ended, 300)
        log = cluster.log(job)
        assert state["JobState"] == "COMPLETED" and state["Restarts"] == "1", log
        assert state["ExcNodeList"] == "n0" and state["NodeList"] == "n1"
        assert "n0: " in log and "GiB free in /dev/shm, expected 1000000" in log
