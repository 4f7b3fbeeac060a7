"""Steps as a person writes them: ``0,10-12,/50`` is step 0, steps 10 to 12, and every 50th."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybridrl.errors import ConfigError

_ITEM = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?|/(?P<every>\d+)")


@dataclass(frozen=True, slots=True)
class StepList:
    """A set of steps.

    Attributes:
        ranges: First and last step of each.
        strides: Every multiple of each is in the set.
    """

    ranges: tuple[tuple[int, int], ...]
    strides: tuple[int, ...]

    def __contains__(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.ranges) or any(step % n == 0 for n in self.strides)


def is_step_list(text: str) -> bool:
    """Return whether a text can be read as a list of steps."""
    try:
        parse_steps(text)
    except ConfigError:
        return False
    return True


def parse_steps(text: str) -> StepList:
    """Read a list of steps.

    Raises:
        ConfigError: It is none.
    """
    ranges, strides = [], []
    for item in text.split(","):
        found = _ITEM.fullmatch(item.strip())
        if found is None or found["every"] == "0":
            raise ConfigError(f"got {text!r}, expected steps such as 0,10-12,/50 (step 0, steps 10 to 12, every 50th)")
        if found["every"]:
            strides.append(int(found["every"]))
        else:
            ranges.append((int(found["first"]), int(found["last"] or found["first"])))
    return StepList(tuple(ranges), tuple(strides))
