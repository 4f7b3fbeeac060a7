"""Cluster files: all that are shipped can be read, and a faulty one is told all its faults."""

from __future__ import annotations

import pytest

from hybridrl.errors import ConfigError
from hybridrl.planning.cluster import read_cluster
from hybridrl.reshard.topology import H100_CLUSTER
from tests.unit.planning.recipes import CONFIGS, cluster

SHIPPED = sorted(path.stem for path in (CONFIGS / "clusters").glob("*.yaml"))


def test_the_usual_devices_are_shipped():
    assert {"a100", "b200", "cpu", "h100", "h20", "h200"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_cluster_can_be_read(name):
    assert cluster(name).topology.node_gb_per_s > 0


def test_rates_are_those_that_transfers_reach():
    topology = cluster("h100").topology
    assert topology.node_gb_per_s == pytest.approx(H100_CLUSTER.node_gb_per_s)
    assert topology.nic_gb_per_s == pytest.approx(H100_CLUSTER.nic_gb_per_s)


def test_all_faults_are_listed_at_once(tmp_path):
    path = tmp_path / "cluster.yaml"
    text = (CONFIGS / "clusters" / "h100.yaml").read_text()
    text = text.replace("devices_per_node: 8", "devices_per_node: 7.5").replace("memory_gib: 79.1", "memory_gib: none")
    path.write_text(text.replace("nics_per_node: 8", "nic_count: 8"))
    with pytest.raises(ConfigError) as caught:
        read_cluster(path)
    assert len(caught.value.problems) == 4
    for part in (
        "devices_per_node: got 7.5, expected a whole number > 0",
        "memory_gib: got 'none', expected a number > 0",
        "nic_count: unknown key, expected one of name, devices_per_node",
        "nics_per_node: missing",
    ):
        assert f"{path}: {part}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such file or directory, expected a cluster file"), ("- 1", "got [1]"), ("a: [", "not valid YAML")],
)
def test_a_file_that_is_no_cluster_is_refused(tmp_path, text, message):
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_cluster(path)
    assert message in str(caught.value)
