"""Say at once what this machine lacks before anything is installed; called by ``make setup`` with the system's Python.

Needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path


def main(platform: str) -> None:
    """Exit with every problem found, or return."""
    wanted = (3, 11) if platform == "cpu" else (3, 12)
    problems = []
    if sys.version_info[:2] != wanted:
        got = f"{sys.version_info[0]}.{sys.version_info[1]}"
        problems.append(
            f"Python {got}: the pinned {platform} packages are for {wanted[0]}.{wanted[1]}; name one with PYTHON=..."
        )
    if importlib.util.find_spec("ensurepip") is None:
        problems.append("no ensurepip: virtual environments cannot be made (Debian: apt install python3-venv)")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        problems.append("no Python.h: the extension cannot be built (Debian: apt install python3-dev)")
    if shutil.which("g++") is None:
        problems.append("no g++: the extension cannot be built, and vLLM compiles at start (Debian: apt install g++)")
    if platform == "cpu" and not _loads("libnuma.so.1"):
        problems.append("no libnuma.so.1: vLLM for CPU cannot be imported (Debian: apt install libnuma1)")
    if problems:
        sys.exit("\n".join(["This machine lacks something:"] + [f"  - {problem}" for problem in problems]))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1])
