"""Bundles and slots for each way of sharing devices."""

from __future__ import annotations

import pytest

from hybridrl.config.choices import Platform
from hybridrl.errors import EngineError
from hybridrl.roles.placement import in_node_order, place_pool


def test_a_pool_on_cpu_has_a_bundle_per_process() -> None:
    placed = place_pool(Platform.CPU, 4, 2, 2)
    assert placed.bundles == ({"CPU": 1},) * 4 + ({"CPU": 2},) * 2
    assert [slot.bundle for slot in placed.ranks] == [0, 1, 2, 3]
    assert [(slot.bundle, slot.num_cpus) for slot in placed.replicas] == [(4, 2), (5, 2)]
    assert placed.num_cpus == 8


def test_roles_in_pools_of_their_own_have_whole_devices() -> None:
    ranks, replicas = place_pool(Platform.CUDA, 4, 0, 2), place_pool(Platform.CUDA, 0, 2, 2)
    assert (ranks.bundles, replicas.bundles) == (({"CPU": 1, "GPU": 1},) * 4, ({"CPU": 2, "GPU": 2},) * 2)
    assert [(slot.bundle, slot.num_gpus) for slot in replicas.replicas] == [(0, 2), (1, 2)]


def test_ranks_and_replicas_of_a_pool_on_cuda_share_each_device_half_and_half() -> None:
    placed = place_pool(Platform.CUDA, 4, 2, 1)
    assert placed.bundles == ({"CPU": 2, "GPU": 1},) * 4
    assert [slot.bundle for slot in placed.ranks] == [0, 1, 2, 3] and [s.bundle for s in placed.replicas] == [0, 1]
    assert {slot.num_gpus for slot in placed.ranks + placed.replicas} == {0.5}


def test_a_replica_over_several_shared_devices_is_refused_with_a_way_on() -> None:
    with pytest.raises(EngineError, match=r"give placement\.rollout a pool of its own, or set rollout\.tp_size to 1"):
        place_pool(Platform.CUDA, 4, 2, 2)


def test_consecutive_ranks_share_a_node_however_the_cluster_granted_the_bundles() -> None:
    rank, replica = {"CPU": 1}, {"CPU": 2}
    assert in_node_order([rank] * 4, ["a", "b", "a", "b"]) == [0, 2, 1, 3]
    assert in_node_order([rank, rank, replica, replica], ["b", "a", "b", "a"]) == [1, 0, 3, 2]
