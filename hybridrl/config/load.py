"""From YAML files and overrides to one typed configuration: schema <- files <- overrides, merged by OmegaConf.

Every fault is found before anything is raised: unknown keys, wrong types, values out of bounds, keys given twice, missing
mandatory keys, each with the file and line where it is written. Faults that need more than one key, or the model, are
found by ``hybridrl/preflight`` on the :class:`Draft`, so that a person sees all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.keys import Schema, experiment_schema
from hybridrl.config.schema import ExperimentConfig
from hybridrl.config.source import Entry, Sources
from hybridrl.config.values import Value

_INTERPOLATION = "${"


@dataclass(frozen=True, slots=True)
class Draft:
    """A configuration and what is known to be wrong with it.

    Attributes:
        config: With the default wherever a value is broken, and empty text where a mandatory one is missing.
        path: The main file.
        origins: Dotted key -> where its value was written; keys at their default are absent.
        problems: One line each.
        broken: Keys and sections that these problems are about.
    """

    config: ExperimentConfig
    path: Path
    origins: Mapping[str, str]
    problems: tuple[str, ...]
    broken: frozenset[str]

    def is_broken(self, key: str) -> bool:
        """Return whether a key, a section around it or a key inside it has a problem already."""
        return any(f"{key}.".startswith(f"{bad}.") or f"{bad}.".startswith(f"{key}.") for bad in self.broken)

    def where(self, key: str) -> str:
        """Return ``file:line``, ``command line``, or the main file for a key at its default."""
        return self.origins.get(key, str(self.path))

    def keys_set(self, section: str) -> tuple[str, ...]:
        """Return the keys of a section, or the key of that name, that were written somewhere."""
        return tuple(key for key in self.origins if f"{key}.".startswith(f"{section}."))


def read_draft(path: Path, overrides: Sequence[str] = ()) -> Draft:
    """Read a configuration and gather its problems.

    Args:
        overrides: ``key=value``; relative paths in them are relative to the working directory, those in a file to the file.
    """
    schema = experiment_schema()
    sources = Sources(schema)
    sources.add_file(path)
    sources.add_overrides(overrides, Path.cwd())
    final: dict[str, Entry] = {}
    values: dict[str, Any] = {}
    for entry in sources.entries:
        final[entry.key] = entry
        _set_nested(values, entry.key, entry.value)
    merged = OmegaConf.merge(OmegaConf.structured(ExperimentConfig), values)
    assert isinstance(merged, DictConfig), type(merged)
    _resolve_interpolations(merged, final, sources)
    _fill_mandatory(merged, schema, sources, path)
    _anchor_paths(merged, schema, final)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ExperimentConfig), type(config)
    origins = {key: entry.where for key, entry in final.items()}
    return Draft(config, path, origins, tuple(sources.problems), frozenset(sources.broken))


def _set_nested(values: dict[str, Any], key: str, value: Value) -> None:
    """Set ``values["a"]["b"]`` for the key ``a.b``."""
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value


def _resolve_interpolations(merged: DictConfig, final: Mapping[str, Entry], sources: Sources) -> None:
    """Replace ``${key}`` in text by the value of that key."""
    for key, entry in final.items():
        if _INTERPOLATION not in entry.text.text:
            continue
        try:
            resolved = OmegaConf.select(merged, key, throw_on_missing=True)
        except OmegaConfBaseException as e:
            reason = str(e).splitlines()[0]
            sources.report(entry.where, key, f"got {entry.text}, expected the name of another key in it; {reason}")
            resolved = ""
        OmegaConf.update(merged, key, resolved)


def _fill_mandatory(merged: DictConfig, schema: Schema, sources: Sources, path: Path) -> None:
    """Report mandatory keys without a value, and give them an empty one."""
    missing = OmegaConf.missing_keys(merged)
    for name, key in schema.keys.items():
        if name in missing:
            if name not in sources.broken:
                hint = f"it is: {key.setting.doc}"
                sources.report(str(path), name, f"missing, expected {key.expected()}; {hint}")
            OmegaConf.update(merged, name, "")


def _anchor_paths(merged: DictConfig, schema: Schema, final: Mapping[str, Entry]) -> None:
    """Make input paths absolute, from the folder that each is relative to."""
    for name, entry in final.items():
        value = OmegaConf.select(merged, name)
        if schema.keys[name].setting.is_input_path and value:
            OmegaConf.update(merged, name, str((entry.folder.absolute() / value).resolve()))
