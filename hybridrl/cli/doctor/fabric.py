"""The network between nodes: InfiniBand or RoCE ports, GPUDirect, and variables that make NCCL slow or let it hang."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridrl.cli.doctor.finding import Finding, Verdict

_OFF = ("0", "", "false")
_TRAPS: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "NCCL_DEBUG": (lambda value: value.upper() in ("INFO", "TRACE"), "set it to WARN: each rank writes thousands of lines"),
    "NCCL_P2P_DISABLE": (lambda value: value not in _OFF, "unset it: GPUs of a node would not use NVLink"),
    "NCCL_SHM_DISABLE": (lambda value: value not in _OFF, "unset it: GPUs of a node would use the network"),
    "NCCL_IB_DISABLE": (lambda value: value not in _OFF, "unset it: nodes would use sockets instead of InfiniBand or RoCE"),
    "NCCL_NET_GDR_LEVEL": (lambda value: value.upper() in ("0", "LOC"), "unset it: GPUDirect would be off"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (lambda value: value == "0", "unset it: a lost peer would hang its group"),
    "CUDA_LAUNCH_BLOCKING": (lambda value: value not in _OFF, "unset it: every kernel would be waited for"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Port:
    name: str
    is_active: bool
    state: str
    gbit_per_s: float


def ports(infiniband: Path, verbs: Path) -> Iterator[Finding]:
    """Yield the state of the InfiniBand and RoCE ports.

    Args:
        infiniband: The kernel's list of devices, /sys/class/infiniband.
        verbs: Device files through which processes use them, /dev/infiniband.
    """
    found = [_read_port(path) for path in sorted(infiniband.glob("*/ports/*"))]
    if not found:
        yield Finding("fabric", Verdict.OK, "no InfiniBand or RoCE devices; other nodes are reached through sockets")
        return
    active = [port for port in found if port.is_active]
    state = f"{len(active)} of {len(found)} ports active"
    if not active:
        yield Finding("fabric", Verdict.PROBLEM, state, "look at ibstat, cables and the subnet manager")
        return
    fastest = max(port.gbit_per_s for port in active)
    odd = [f"{port.name} {port.state}" for port in found if not port.is_active or port.gbit_per_s < fastest]
    state = f"{state}, {fastest:g} Gb/s" + (f"; {', '.join(odd)}" if odd else "")
    advice = "if these are meant for NCCL, reseat the cable or drain the node; else list the others in NCCL_IB_HCA"
    yield Finding("fabric", Verdict.WARNING if odd else Verdict.OK, state, advice)
    if not list(verbs.glob("uverbs*")):
        advice = "give the container --device /dev/infiniband: NCCL would fall back to sockets"
        yield Finding("fabric devices", Verdict.PROBLEM, f"{verbs} has no uverbs files", advice)


def gpudirect(infiniband: Path, proc: Path) -> Iterator[Finding]:
    """Yield whether network cards can read GPU memory; asked only where there are both.

    Args:
        proc: The kernel's /proc.
    """
    driver = proc / "driver" / "nvidia" / "version"
    if not list(infiniband.glob("*/ports/*")) or not driver.is_file():
        return
    if any(line.startswith("nvidia_peermem ") for line in (proc / "modules").read_text().splitlines()):
        yield Finding("GPUDirect", Verdict.OK, "nvidia_peermem is loaded")
    elif "Open Kernel Module" in driver.read_text():
        yield Finding("GPUDirect", Verdict.OK, "open kernel modules, which share memory as DMA-BUF")
    else:
        advice = "modprobe nvidia_peermem: without it bytes between nodes go through host memory"
        yield Finding("GPUDirect", Verdict.WARNING, "nvidia_peermem is not loaded", advice)


def variables(environ: Mapping[str, str], interfaces: Collection[str]) -> Iterator[Finding]:
    """Yield settings of the environment that runs inherit and that cost speed or hide errors.

    Args:
        interfaces: Network interfaces of this machine.
    """
    findings = [
        Finding(name, Verdict.WARNING, f"is {environ[name]}", advice)
        for name, (is_trap, advice) in _TRAPS.items()
        if name in environ and is_trap(environ[name])
    ]
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = environ.get(name, "")
        if wanted and not wanted.startswith("^") and not _matches(wanted, interfaces):
            advice = f"name one of {', '.join(sorted(interfaces))}, or unset it"
            findings.append(Finding(name, Verdict.PROBLEM, f"is {wanted}, which is no interface here", advice))
    yield from findings or [Finding("NCCL variables", Verdict.OK, "none that costs speed or hides errors")]


def _matches(wanted: str, interfaces: Collection[str]) -> bool:
    """Match as NCCL does: a list of prefixes, or of whole names after ``=``."""
    names = wanted.removeprefix("=").split(",")
    if wanted.startswith("="):
        return any(name in interfaces for name in names)
    return any(interface.startswith(name) for name in names for interface in interfaces)


def _read_port(path: Path) -> _Port:
    """Read a port's files, such as ``4: ACTIVE`` and ``400 Gb/sec (4X NDR)``."""
    state, rate = ((path / name).read_text().strip() for name in ("state", "rate"))
    name = f"{path.parent.parent.name}:{path.name}"
    label = state.rpartition(" ")[2]
    return _Port(name, label == "ACTIVE", f"{label}, {rate}", float(rate.split()[0]))
