"""Sizes in words: memory in powers of 1024, traffic and files in powers of 1000."""

from __future__ import annotations


def binary(size: float) -> str:
    """Return bytes of memory, e.g. ``30.13 GiB``."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB"))


def decimal(size: float) -> str:
    """Return bytes of traffic or files, e.g. ``244.36 GB``."""
    return _scaled(size, 1000, ("B", "kB", "MB", "GB", "TB"))


def _scaled(size: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while power + 1 < len(units) and size >= base ** (power + 1):
        power += 1
    return f"{size / base**power:,.{2 if power else 0}f} {units[power]}"
