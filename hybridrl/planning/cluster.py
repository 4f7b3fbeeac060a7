"""A cluster of equal nodes, as a YAML file describes it: the hardware's own figures, and the share of them that is reached."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import yaml

from hybridrl.errors import ConfigError
from hybridrl.reshard.topology import Topology


@dataclass(frozen=True, slots=True)
class Cluster:
    """Figures per device and node; rates are per direction.

    Attributes:
        memory_gib: Memory of a device.
        memory_gb_per_s: Rate of that memory.
        peak_tflops: Dense bfloat16.
        copy_gb_per_s: A copy within a device, read and write counted once.
        node_gb_per_s: Between devices of a node, per device.
        nic_gb_per_s: Per NIC.
        link_share: Share of node and NIC rates that transfers reach.
        message_us: Fixed cost of a message at each of its two ends.
    """

    name: str
    devices_per_node: int
    memory_gib: float
    memory_gb_per_s: float
    peak_tflops: float
    copy_gb_per_s: float
    node_gb_per_s: float
    nic_gb_per_s: float
    nics_per_node: int
    link_share: float = 0.8
    message_us: float = 20.0

    @property
    def memory_bytes(self) -> int:
        """Bytes of a device."""
        return int(self.memory_gib * 2**30)

    @property
    def topology(self) -> Topology:
        """The links, with the rates that transfers reach."""
        return Topology(
            self.name,
            device_gb_per_s=self.copy_gb_per_s,
            node_gb_per_s=self.node_gb_per_s * self.link_share,
            nic_gb_per_s=self.nic_gb_per_s * self.link_share,
            nics_per_node=self.nics_per_node,
            message_s=self.message_us * 1e-6,
        )


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file.

    Raises:
        ConfigError: Listing every key that is missing, unknown, or not a positive number.
    """
    values = _read(path)
    known = {field.name: field for field in fields(Cluster)}
    problems = [f"{path}: {name}: unknown key, expected one of {', '.join(known)}" for name in values.keys() - known]
    for name, field in known.items():
        if name not in values:
            if field.default is MISSING:
                problems.append(f"{path}: {name}: missing")
        elif name != "name" and (expected := _misfit(values[name], is_whole=field.type == "int")):
            problems.append(f"{path}: {name}: got {values[name]!r}, expected {expected}")
    if problems:
        raise ConfigError(sorted(problems))
    return Cluster(**values)  # type: ignore[arg-type]


def _read(path: Path) -> dict[str, object]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        hint = "configs/clusters has files for common devices"
        raise ConfigError(f"{path}: {(e.strerror or str(e)).lower()}, expected a cluster file; {hint}") from e
    except (ValueError, yaml.YAMLError) as e:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(e).split())}") from e
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: got {loaded!r}, expected keys and values, for example memory_gib: 80")
    return {str(key): value for key, value in loaded.items()}


def _misfit(value: object, *, is_whole: bool) -> str | None:
    """Return what was expected instead of a value; None when it fits."""
    is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
    if is_number and value > 0:  # type: ignore[operator]
        return None
    return f"a {'whole ' if is_whole else ''}number > 0"
