"""Bundles and slots for each way of sharing devices."""

from __future__ import annotations

import pytest

from hybridrl.config.schema import Placement, Platform
from hybridrl.errors import EngineError
from hybridrl.roles.placement import in_node_order, place_roles


def test_colocated_on_cpu_is_one_pool_with_a_bundle_per_process() -> None:
    placed = place_roles(Platform.CPU, Placement.COLOCATED, 4, 2, 2)
    assert placed.pools == (({"CPU": 1},) * 4 + ({"CPU": 2},) * 2,)
    assert [slot.bundle for slot in placed.actor] == [0, 1, 2, 3]
    assert [(slot.pool, slot.bundle, slot.num_cpus) for slot in placed.rollout] == [(0, 4, 2), (0, 5, 2)]
    assert placed.num_cpus == 8


def test_split_is_a_pool_per_role() -> None:
    placed = place_roles(Platform.CUDA, Placement.SPLIT, 4, 2, 2)
    assert placed.pools == (({"CPU": 1, "GPU": 1},) * 4, ({"CPU": 2, "GPU": 2},) * 2)
    assert [(slot.pool, slot.bundle, slot.num_gpus) for slot in placed.rollout] == [(1, 0, 2), (1, 1, 2)]


def test_colocated_on_cuda_shares_each_device_half_and_half() -> None:
    placed = place_roles(Platform.CUDA, Placement.COLOCATED, 4, 2, 1)
    assert placed.pools == (({"CPU": 2, "GPU": 1},) * 4,)
    assert {slot.num_gpus for slot in placed.actor + placed.rollout} == {0.5}


def test_a_replica_over_several_shared_devices_is_refused_with_a_way_on() -> None:
    with pytest.raises(EngineError, match=r"use placement: split, or rollout\.tp_size 1"):
        place_roles(Platform.CUDA, Placement.COLOCATED, 4, 2, 2)


def test_consecutive_ranks_share_a_node_however_the_cluster_granted_the_bundles() -> None:
    rank, replica = {"CPU": 1}, {"CPU": 2}
    assert in_node_order([rank] * 4, ["a", "b", "a", "b"]) == [0, 2, 1, 3]
    assert in_node_order([rank, rank, replica, replica], ["b", "a", "b", "a"]) == [1, 0, 3, 2]
