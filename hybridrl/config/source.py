"""Where values are written: YAML files, the files they include, and the command line, as (key, text, place) entries.

A file may name others under ``include:``, relative to itself; what it says itself comes after them and wins. Files are
read as YAML nodes, which know their lines; nothing stops at the first fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from hybridrl.config.keys import Schema, join
from hybridrl.config.values import Misfit, Text, Value, convert

INCLUDE_KEY = "include"
COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Entry:
    """One value as it was written.

    Attributes:
        where: ``file:line`` or ``command line``.
        folder: What a relative path in it is relative to.
    """

    key: str
    text: Text
    value: Value
    where: str
    folder: Path


@dataclass(slots=True)
class Sources:
    """Entries in the order in which they are merged (later ones win), and the faults among them.

    Attributes:
        broken: Keys and sections that have a fault.
    """

    schema: Schema
    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def report(self, where: str, key: str, problem: str) -> None:
        """Note a fault of a key."""
        self.problems.append(f"{where}: {key}: {problem}")
        self.broken.add(key)

    def add_file(self, path: Path, including: tuple[Path, ...] = ()) -> None:
        """Add what a YAML file and the files that it includes say."""
        root = self._compose(path)
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            self.problems.append(f"{path}:1: got {_describe(root)}, expected keys and values, for example name: demo")
            return
        members = self._members(root, "", path)
        if INCLUDE_KEY in members:
            self._add_includes(members.pop(INCLUDE_KEY), path, (*including, path.absolute()))
        self._add_members(members, "", path)

    def add_overrides(self, overrides: Sequence[str], folder: Path) -> None:
        """Add ``key=value`` overrides of the command line."""
        seen: set[str] = set()
        for override in overrides:
            key, separator, text = override.partition("=")
            if not separator:
                self.problems.append(f"{COMMAND_LINE}: got {override!r}, expected key=value, for example seed=2")
            elif key in seen:
                self.report(COMMAND_LINE, key, "given twice, expected once; remove one of the two")
            else:
                seen.add(key)
                self._add_value(key, Text(text), COMMAND_LINE, folder)

    def _compose(self, path: Path) -> yaml.Node | None:
        try:
            return yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)
        except OSError as e:
            reason = (e.strerror or str(e)).lower()
            self.problems.append(f"{path}: {reason}, expected a YAML configuration; correct the path")
        except yaml.MarkedYAMLError as e:
            mark = e.problem_mark or e.context_mark
            line = f":{mark.line + 1}" if mark else ""
            self.problems.append(f"{path}{line}: not valid YAML: {e.problem or e.context}; correct the line")
        except yaml.YAMLError as e:
            self.problems.append(f"{path}: not valid YAML: {' '.join(str(e).split())}; save the file as UTF-8 text")
        return None

    def _add_includes(self, node: yaml.Node, path: Path, chain: tuple[Path, ...]) -> None:
        names = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for name in names:
            where = f"{path}:{name.start_mark.line + 1}"
            included = path.parent / name.value if isinstance(name, yaml.ScalarNode) else None
            if included is None or not included.is_file():
                got = _describe(name)
                self.report(where, INCLUDE_KEY, f"got {got}, expected the path of a YAML file, relative to this one")
            elif included.absolute() in chain:
                self.report(where, INCLUDE_KEY, f"{included} includes itself; remove one include")
            else:
                self.add_file(included, chain)

    def _add_members(self, members: Mapping[str, yaml.Node], section: str, path: Path) -> None:
        for name, node in members.items():
            key, where = join(section, name), f"{path}:{node.start_mark.line + 1}"
            if isinstance(node, yaml.ScalarNode):
                self._add_value(key, Text(node.value, is_quoted=node.style is not None), where, path.parent)
            elif key in self.schema.sections and isinstance(node, yaml.MappingNode):
                self._add_members(self._members(node, key, path), key, path)
            elif key in self.schema.keys:
                known = self.schema.keys[key]
                hint = f"it is: {known.setting.doc}"
                self.report(where, key, f"got {_describe(node)}, expected {known.expected()}; {hint}")
            elif key in self.schema.sections:
                self._report_section(where, key, _describe(node))
            else:
                self._report_unknown(where, key)

    def _members(self, section: yaml.MappingNode, section_name: str, path: Path) -> dict[str, yaml.Node]:
        """Return names and values of a section; report names that occur twice."""
        members: dict[str, yaml.Node] = {}
        lines: dict[str, int] = {}
        for name_node, node in section.value:
            name, line = str(name_node.value), name_node.start_mark.line + 1
            if name in members:
                problem = f"also on line {lines[name]}, expected once; remove one of the two"
                self.report(f"{path}:{line}", join(section_name, name), problem)
            else:
                members[name], lines[name] = node, line
        return members

    def _add_value(self, key: str, value: Text, where: str, folder: Path) -> None:
        if key in self.schema.keys:
            converted = convert(value, self.schema.keys[key])
            if isinstance(converted, Misfit):
                self.report(where, key, f"got {value}, expected {converted.expected}; {converted.hint}")
            else:
                self.entries.append(Entry(key, value, converted, where, folder))
        elif key in self.schema.sections:
            self._report_section(where, key, str(value) if value.text else "nothing")
        else:
            self._report_unknown(where, key)

    def _report_section(self, where: str, key: str, got: str) -> None:
        members = ", ".join(self.schema.sections[key])
        self.report(where, key, f"got {got}, expected a section; set one of its keys: {members}")

    def _report_unknown(self, where: str, key: str) -> None:
        self.report(where, key, f"unknown key, expected a key of the schema; {self.schema.suggest(key)}")


def _describe(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "a section" if isinstance(node, yaml.MappingNode) else repr(node.value)
