"""Numbers on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

N = TypeVar("N", int, float)


def number(kind: type[N], at_least: int) -> Callable[[str], N]:
    """Return what reads an argument of argparse that is a number with a lower bound."""

    def read(text: str) -> N:
        value = kind(text)
        if not value >= at_least:
            raise argparse.ArgumentTypeError(f"got {text}, expected a number >= {at_least}")
        return value

    return read
