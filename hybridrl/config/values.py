"""From the text of a value to the type that the schema declares for its key."""

from __future__ import annotations

import difflib
import enum
import math
import re
from dataclasses import dataclass

from hybridrl.config.keys import Key

Value = bool | int | float | str | enum.Enum | None
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9][0-9_]*")
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Text:
    """A value as it was written; what is quoted is text and nothing else."""

    text: str
    is_quoted: bool = False

    def __str__(self) -> str:
        return repr(self.text) if self.is_quoted or not self.text else self.text


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a value does not fit its key: what was expected, and a hint."""

    expected: str
    hint: str


def convert(written: Text, key: Key) -> Value | Misfit:
    """Return the value that a key gets, checked against its bounds."""
    text = written.text
    if not written.is_quoted and text in _NULLS and not (key.kind is str and text == "" and not key.is_optional):
        return None if key.is_optional else _misfit(key)
    if key.kind is str:
        return text if text else _misfit(key)
    if written.is_quoted and not issubclass(key.kind, enum.Enum):
        return Misfit(key.expected(), "remove the quotes")
    if issubclass(key.kind, enum.Enum):
        return _choose(text, key)
    if key.kind is bool:
        return _BOOLS.get(text.lower(), _misfit(key))
    number = _number(text, key.kind)
    return number if number is not None and key.setting.admits(number) else _misfit(key)


def _number(text: str, kind: type) -> int | float | None:
    if kind is int:
        return int(text) if _WHOLE_NUMBER.fullmatch(text) else None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _choose(text: str, key: Key) -> enum.Enum | Misfit:
    choices: dict[str, enum.Enum] = {str(member.value): member for member in key.kind}  # type: ignore[attr-defined]
    if text in choices:
        return choices[text]
    similar = difflib.get_close_matches(text.lower(), choices, n=1)
    return Misfit(key.expected(), f"did you mean {similar[0]}?" if similar else f"it is: {key.setting.doc}")


def _misfit(key: Key) -> Misfit:
    return Misfit(key.expected(), f"it is: {key.setting.doc}")
