"""Writes requirements/<platform>-lock.txt: the versions of everything that requirements/<platform>.txt brings along, as installed.

    python scripts/lock_requirements.py cpu        after the tests have passed in the environment that runs this

``make setup`` and the Dockerfile hand the file to pip as constraints, so that an installation of next year is the one that was tested.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
HEADER = "# Made by scripts/lock_requirements.py; constraints, not requirements.\n"


def locked(requirements: list[Requirement]) -> dict[str, str]:
    """Return the version of every package that is installed for the requirements; what was uninstalled again is not among them."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    open_ones = list(requirements)
    while open_ones:
        requirement = open_ones.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        versions[name] = package.version
        further = map(Requirement, package.requires or ())
        open_ones += [r for r in further if not r.marker or any(r.marker.evaluate({"extra": e}) for e in ("", *extras))]
    return versions


def main(platform: str) -> None:
    lines = (FOLDER / f"{platform}.txt").read_text().splitlines()
    named = [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]
    pinned = {canonicalize_name(requirement.name) for requirement in named}
    rows = [f"{name}=={version}\n" for name, version in sorted(locked(named).items()) if name not in pinned]
    (FOLDER / f"{platform}-lock.txt").write_text(HEADER + "".join(rows))


if __name__ == "__main__":
    main(sys.argv[1])
