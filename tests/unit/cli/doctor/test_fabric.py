"""Ports between nodes and variables of NCCL, on folders like those of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.cli.doctor.fabric import gpudirect, ports, variables
from hybridrl.cli.doctor.finding import Verdict


def port(folder: Path, device: str, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> None:
    files = folder / device / "ports" / "1"
    files.mkdir(parents=True)
    (files / "state").write_text(f"{state}\n")
    (files / "rate").write_text(f"{rate}\n")


@pytest.fixture
def verbs(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "uverbs0").touch()
    return tmp_path / "dev"


def test_equal_active_ports_are_ok_and_so_is_a_node_without_any(tmp_path: Path, verbs: Path) -> None:
    (none,) = ports(tmp_path / "class", verbs)
    assert none.verdict is Verdict.OK and "sockets" in none.state
    for device in ("mlx5_0", "mlx5_1"):
        port(tmp_path / "class", device)
    (found,) = ports(tmp_path / "class", verbs)
    assert found.verdict is Verdict.OK and found.state == "2 of 2 ports active, 400 Gb/s"


@pytest.mark.parametrize(
    ("state", "rate", "words"),
    [
        ("1: DOWN", "400 Gb/sec (4X NDR)", "mlx5_1:1 DOWN, 400 Gb/sec (4X NDR)"),
        ("4: ACTIVE", "100 Gb/sec (1X NDR)", "mlx5_1:1 ACTIVE, 100 Gb/sec (1X NDR)"),
    ],
)
def test_a_port_that_is_down_or_slower_than_the_others_is_named(
    tmp_path: Path, verbs: Path, state: str, rate: str, words: str
) -> None:
    port(tmp_path / "class", "mlx5_0")
    port(tmp_path / "class", "mlx5_1", state, rate)
    (found,) = ports(tmp_path / "class", verbs)
    assert found.verdict is Verdict.WARNING and words in found.state and "NCCL_IB_HCA" in found.advice


def test_no_active_port_is_a_problem(tmp_path: Path, verbs: Path) -> None:
    port(tmp_path / "class", "mlx5_0", "2: INIT")
    (found,) = ports(tmp_path / "class", verbs)
    assert found.verdict is Verdict.PROBLEM and "subnet manager" in found.advice


def test_a_container_without_the_device_files_is_told_how_to_get_them(tmp_path: Path) -> None:
    port(tmp_path / "class", "mlx5_0")
    _, found = ports(tmp_path / "class", tmp_path / "dev")
    assert found.verdict is Verdict.PROBLEM and "--device /dev/infiniband" in found.advice


@pytest.mark.parametrize(
    ("modules", "driver", "verdict"),
    [
        ("nvidia_peermem 16384 0 - Live\n", "NVIDIA UNIX x86_64 Kernel Module", Verdict.OK),
        ("nvidia 1 0 - Live\n", "NVIDIA UNIX Open Kernel Module for x86_64", Verdict.OK),
        ("nvidia 1 0 - Live\n", "NVIDIA UNIX x86_64 Kernel Module", Verdict.WARNING),
    ],
)
def test_gpudirect_needs_a_module_that_shares_memory(
    tmp_path: Path, modules: str, driver: str, verdict: Verdict
) -> None:
    proc = tmp_path / "proc"
    (proc / "driver" / "nvidia").mkdir(parents=True)
    (proc / "driver" / "nvidia" / "version").write_text(driver)
    (proc / "modules").write_text(modules)
    assert not list(gpudirect(tmp_path / "class", proc))
    port(tmp_path / "class", "mlx5_0")
    (found,) = gpudirect(tmp_path / "class", proc)
    assert found.verdict is verdict


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("NCCL_DEBUG", "INFO", Verdict.WARNING),
        ("NCCL_DEBUG", "WARN", Verdict.OK),
        ("NCCL_IB_DISABLE", "1", Verdict.WARNING),
        ("NCCL_IB_DISABLE", "0", Verdict.OK),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", Verdict.WARNING),
        ("NCCL_SOCKET_IFNAME", "eth", Verdict.OK),
        ("NCCL_SOCKET_IFNAME", "=eth", Verdict.PROBLEM),
        ("NCCL_SOCKET_IFNAME", "=eth0", Verdict.OK),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", Verdict.OK),
        ("GLOO_SOCKET_IFNAME", "ib0", Verdict.PROBLEM),
    ],
)
def test_variables_that_cost_speed_or_name_nothing_are_found(name: str, value: str, verdict: Verdict) -> None:
    (found,) = variables({name: value}, ["lo", "eth0"])
    assert found.verdict is verdict
    assert verdict is Verdict.OK or found.what == name
