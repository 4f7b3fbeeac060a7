"""How a setting declares itself: default, documentation, bounds, and whether it is a path.

The schema writes these as dataclass field metadata; ``load.py`` reads them, so a bound is stated once, beside the key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any

_METADATA_KEY = "hybridrl"


@dataclass(frozen=True, slots=True)
class Setting:
    """What the schema says about one key.

    Attributes:
        doc: What it means, with its unit.
        at_least: Smallest value allowed.
        above: Values must be larger than this.
        at_most: Largest value allowed.
        below: Values must be smaller than this.
        is_input_path: Names something that exists already; in a YAML file it is relative to that file.
    """

    doc: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    is_input_path: bool = False

    def admits(self, value: float) -> bool:
        """Return whether a number lies within the bounds."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def bounds(self) -> str:
        """Describe the bounds, e.g. ``> 0 and <= 1``; empty when there are none."""
        limits = ((">=", self.at_least), (">", self.above), ("<=", self.at_most), ("<", self.below))
        return " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)


def setting(default: object, doc: str, **rules: Any) -> Any:
    """Return a dataclass field for a key of the configuration.

    Args:
        default: Value, or the dataclass of a section; ``"???"`` makes the key mandatory.
        doc: What it means, with its unit.
        rules: Other attributes of :class:`Setting`.
    """
    metadata = {_METADATA_KEY: Setting(doc, **rules)}
    if isinstance(default, type):
        factory: Callable[[], object] = default
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def setting_of(declared: Field[Any]) -> Setting:
    """Return what the schema says about a field."""
    found = declared.metadata[_METADATA_KEY]
    assert isinstance(found, Setting), declared
    return found
