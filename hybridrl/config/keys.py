"""The schema as a table of dotted keys, e.g. ``actor.parallel.tp_size``."""

from __future__ import annotations

import difflib
import enum
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass

from hybridrl.config.fields import Setting, setting_of
from hybridrl.config.schema import ExperimentConfig

MANDATORY = "???"


@dataclass(frozen=True, slots=True)
class Key:
    """One setting of the schema.

    Attributes:
        name: Dotted.
        kind: bool, int, float, str or an Enum.
        is_optional: Whether null is a value.
    """

    name: str
    kind: type
    is_optional: bool
    is_mandatory: bool
    setting: Setting

    def expected(self) -> str:
        """Describe the values allowed, e.g. ``a whole number >= 1``."""
        if issubclass(self.kind, enum.Enum):
            text = "one of " + ", ".join(str(member.value) for member in self.kind)
        else:
            text = _KIND_NAMES[self.kind]
        bounds = self.setting.bounds()
        return " ".join(filter(None, (text, bounds, "or null" if self.is_optional else "")))


_KIND_NAMES: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True)
class Schema:
    """All keys and the sections that hold them.

    Attributes:
        keys: Dotted name -> key.
        sections: Dotted name -> names of the section's members; the root is ``""``.
    """

    keys: Mapping[str, Key]
    sections: Mapping[str, tuple[str, ...]]

    def suggest(self, name: str) -> str:
        """Return what to do about an unknown key: the likeliest keys meant, or the keys of its section."""
        section, _, last = name.rpartition(".")
        while section not in self.sections:
            section, _, last = section.rpartition(".")
        siblings = self.sections[section]
        similar = [join(section, match) for match in difflib.get_close_matches(last, siblings, n=1, cutoff=0.7)]
        final = name.rpartition(".")[2]
        similar = similar or [key for key in self.keys if key.rpartition(".")[2] == final]
        if similar:
            return f"did you mean {' or '.join(similar)}?"
        return f"keys of {section or 'the root'}: {', '.join(siblings)}"


def join(section: str, name: str) -> str:
    """Return the dotted name of a section's member."""
    return f"{section}.{name}" if section else name


def experiment_schema() -> Schema:
    """Return the keys of an experiment's configuration."""
    keys: dict[str, Key] = {}
    sections: dict[str, tuple[str, ...]] = {}
    _collect(ExperimentConfig, "", keys, sections)
    return Schema(keys, sections)


def _collect(owner: type, section: str, keys: dict[str, Key], sections: dict[str, tuple[str, ...]]) -> None:
    assert is_dataclass(owner), owner
    hints = typing.get_type_hints(owner)
    sections[section] = tuple(hints)
    for declared in fields(owner):
        name, hint = join(section, declared.name), hints[declared.name]
        if is_dataclass(hint):
            assert isinstance(hint, type), hint
            _collect(hint, name, keys, sections)
            continue
        is_optional = isinstance(hint, types.UnionType)
        kind = typing.get_args(hint)[0] if is_optional else hint
        assert kind in _KIND_NAMES or issubclass(kind, enum.Enum), (name, hint)
        assert declared.default is not MISSING, name
        keys[name] = Key(name, kind, is_optional, declared.default == MANDATORY, setting_of(declared))
