"""A configuration as YAML, every key written out: what a run's ``config.resolved.yaml`` holds."""

from __future__ import annotations

import enum
from dataclasses import fields, is_dataclass

import yaml

from hybridrl.config.schema import ExperimentConfig


def resolved_yaml(config: ExperimentConfig) -> str:
    """Return a configuration as YAML, in the schema's order; loading it gives an equal configuration."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True, width=10_000)


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {declared.name: _plain(getattr(value, declared.name)) for declared in fields(value)}
    return value.value if isinstance(value, enum.Enum) else value
