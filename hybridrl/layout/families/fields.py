"""Typed reading of an HF ``config.json``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from hybridrl.errors import LayoutError

T = TypeVar("T")


class HfFields:
    """Reads fields by name and type; errors name the file and the field."""

    def __init__(self, config: Mapping[str, object], where: str) -> None:
        self._config = config
        self._where = where
        self._known: set[str] = set()

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer field."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a float or integer field as float."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """Return a boolean field."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        """Return a string field."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def optional_integer(self, name: str) -> int | None:
        """Return an integer field, or None when it is absent or null."""
        return self.integer(name) if self.has(name) else None

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers; empty when it is absent or null."""
        values = self._list(name)
        if not all(isinstance(value, int) for value in values):
            raise self._wrong(name, values, "a list of integers")
        return tuple(value for value in values if isinstance(value, int))

    def strings(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; empty when it is absent or null."""
        values = self._list(name)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, values, "a list of strings")
        return tuple(value for value in values if isinstance(value, str))

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self._config.get(name) is not None

    def ignore(self, *names: str) -> None:
        """Say of fields that the model computes the same whatever they are."""
        self._known.update(names)

    def refuse_unread(self, harmless: Collection[str] = ()) -> None:
        """Raise when a field was neither read nor ignored; null fields count as absent.

        Raises:
            LayoutError: Naming file, fields and values.
        """
        unread = sorted(name for name in self._config if self.has(name) and name not in self._known | set(harmless))
        if unread:
            shown = ", ".join(f"{name}={self._config[name]!r}" for name in unread)
            raise LayoutError(
                f"{self._where}: {shown} not supported: the declaration of this model does not read it, so the model might "
                "compute something else; use a checkpoint without, or extend the declaration"
            )

    def section(self, name: str) -> HfFields | None:
        """Return a nested object, or None when it is absent or null."""
        self._known.add(name)
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return HfFields(value, f"{self._where}: {name}")

    def present(self, *names: str) -> str:
        """Return the first of several names of one field that the file has, or the first of all."""
        return next((name for name in names if self.has(name)), names[0])

    def require(self, name: str, value: object, supported: object) -> None:
        """Raise unless a field has the one value that is supported.

        Raises:
            LayoutError: Naming file, field, got and supported value.
        """
        if value != supported:
            raise LayoutError(
                f"{self._where}: {name} is {value!r}, but only {supported!r} is supported for this family"
            )

    def _list(self, name: str) -> list[object]:
        self._known.add(name)
        value = self._config.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise self._wrong(name, value, "a list")
        return list(value)

    def _value(self, name: str, default: T | None) -> object:
        self._known.add(name)
        value = self._config.get(name)
        if value is not None:
            return value
        if default is None:
            raise LayoutError(f"{self._where}: field {name!r} is missing; restore config.json from the checkpoint")
        return default

    def _wrong(self, name: str, value: object, expected: str) -> LayoutError:
        return LayoutError(f"{self._where}: field {name!r} is {value!r}, expected {expected}")
