"""A configuration as YAML, every key written out: what a run's ``config.resolved.yaml`` holds."""

from __future__ import annotations

import enum
from dataclasses import fields, is_dataclass
from pathlib import Path

import yaml

from hybridrl.config.schema import ExperimentConfig

RESOLVED_NAME = "config.resolved.yaml"


def write_resolved(config: ExperimentConfig, folder: Path) -> Path:
    """Write ``config.resolved.yaml`` into a run's folder and return its path; loading it gives an equal configuration."""
    path = folder / RESOLVED_NAME
    path.write_text(resolved_yaml(config), encoding="utf-8")
    return path


def resolved_yaml(config: ExperimentConfig) -> str:
    """Return a configuration as YAML, in the schema's order."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True, width=10_000)


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {declared.name: _plain(getattr(value, declared.name)) for declared in fields(value)}
    return value.value if isinstance(value, enum.Enum) else value
