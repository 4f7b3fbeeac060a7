"""GPUs: do they answer, is the driver new enough, are they sound, and do they reach each other?

Source of the oldest drivers: CUDA compatibility guide, minor version compatibility.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hybridrl.cli.doctor.finding import Ask, Finding, ProgramError, Verdict

_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
_QUERY = ("name", "driver_version", "memory.total", "ecc.errors.uncorrected.volatile.total")
_DRAIN = "mend the driver, reboot or drain the node"


def devices(ask: Ask, cuda: str | None) -> Iterator[Finding]:
    """Yield what the driver says; one that hangs is found too.

    Args:
        cuda: CUDA version that torch was built for; None for a CPU build.
    """
    try:
        listed = ask(["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"])
    except ProgramError as e:
        yield Finding("GPUs", Verdict.PROBLEM, str(e), _DRAIN)
        return
    if listed is None:
        yield _without_driver(cuda)
        return
    rows = [[field.strip() for field in line.split(",")] for line in listed.strip().splitlines()]
    rows = [row for row in rows if len(row) == len(_QUERY)]
    if not rows:
        yield Finding("GPUs", Verdict.PROBLEM, "the driver lists none", _DRAIN)
        return
    yield _kinds([f"{name}, {memory}" for name, _, memory, _ in rows])
    yield _driver(rows[0][1], cuda)
    yield _memory_errors([errors for *_, errors in rows])
    if len(rows) > 1:
        yield _nvlink(ask)


def _without_driver(cuda: str | None) -> Finding:
    state = "no driver (nvidia-smi is not on PATH)"
    if cuda is None:
        return Finding("GPUs", Verdict.OK, f"{state}; torch is a CPU build")
    advice = "give the container --gpus all, install the driver, or use the packages for CPUs"
    return Finding("GPUs", Verdict.WARNING, f"{state}, but torch was built for CUDA {cuda}", advice)


def _kinds(names: list[str]) -> Finding:
    counts = {name: names.count(name) for name in names}
    state = "; ".join(f"{count} x {name}" for name, count in counts.items())
    verdict = Verdict.OK if len(counts) == 1 else Verdict.WARNING
    return Finding("GPUs", verdict, state, "choose equal ones with CUDA_VISIBLE_DEVICES: the slowest sets the pace")


def _driver(version: str, cuda: str | None) -> Finding:
    if cuda is None:
        return Finding("driver", Verdict.WARNING, f"{version}, but torch is a CPU build", "make setup PLATFORM=gpu")
    oldest = _OLDEST_DRIVER.get(cuda.split(".", maxsplit=1)[0])
    state = f"{version}, for torch with CUDA {cuda}"
    if oldest is None or int(version.split(".", maxsplit=1)[0]) >= oldest:
        return Finding("driver", Verdict.OK, state)
    return Finding("driver", Verdict.PROBLEM, state, f"install driver {oldest} or newer, or a torch for an older CUDA")


def _memory_errors(counts: list[str]) -> Finding:
    damaged = [str(index) for index, count in enumerate(counts) if count.isdigit() and int(count)]
    state = f"uncorrected on GPU {', '.join(damaged)}" if damaged else "none uncorrected"
    return Finding("GPU memory errors", Verdict.PROBLEM if damaged else Verdict.OK, state, "reset or drain the node")


def _nvlink(ask: Ask) -> Finding:
    try:
        status = ask(["nvidia-smi", "nvlink", "--status"]) or ""
    except ProgramError as e:
        return Finding("NVLink", Verdict.WARNING, str(e), "GPUs reach each other over PCIe only")
    rates = re.findall(r"Link \d+: ([\d.]+) GB/s", status)
    num_down = len(re.findall(r"inactive", status, re.IGNORECASE))
    advice = "look at nvidia-smi nvlink --status and at the fabric manager (systemctl status nvidia-fabricmanager)"
    if not rates:  # PCIe cards without a bridge have links, too, all of them down
        slow = "keep tensor and expert parallel groups small: PCIe is slow"
        return Finding("NVLink", Verdict.WARNING, "none is up", f"{slow}; if there should be some, {advice}")
    if num_down:
        return Finding("NVLink", Verdict.PROBLEM, f"{len(rates)} links up, {num_down} down", advice)
    return Finding("NVLink", Verdict.OK, f"{len(rates)} links of {min(map(float, rates)):g} GB/s and more")
