"""Write the table of configuration keys into ``docs/configuration.md``, from the schema.

    python scripts/make_config_reference.py

Everything after the line ``## Keys`` is replaced.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.keys import Key, Schema, experiment_schema, join
from hybridrl.config.schema import ExperimentConfig
from hybridrl.preflight.modes import value_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEADING = "## Keys"


def main() -> None:
    PAGE.write_text(with_reference(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)


def with_reference(page: str) -> str:
    """Return the page with the reference of the present schema."""
    before = page.partition(f"\n{HEADING}\n")[0].rstrip()
    return f"{before}\n\n{HEADING}\n\n" + "\n".join(_reference(experiment_schema())) + "\n"


def _reference(schema: Schema) -> Iterator[str]:
    yield "Written by `scripts/make_config_reference.py` from `hybridrl/config`."
    default = ExperimentConfig()
    for section, members in schema.sections.items():
        keys = [schema.keys[join(section, name)] for name in members if join(section, name) in schema.keys]
        if keys:
            yield from ("", f"### `{section}`" if section else "### Top level", "")
            yield from ("| key | default | values | meaning |", "| --- | --- | --- | --- |")
            yield from (_row(key, value_of(default, key.name)) for key in keys)


def _row(key: Key, default: object) -> str:
    shown = "must be set" if key.is_mandatory else f"`{_yaml(default)}`"
    return f"| `{key.name}` | {shown} | {_escape(key.expected())} | {_escape(key.setting.doc)} |"


def _yaml(value: object) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _escape(text: str) -> str:
    """Keep pipes out of the table's columns, and angle brackets out of HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


if __name__ == "__main__":
    main()
