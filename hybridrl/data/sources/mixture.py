"""Mixture files: several sources of prompts with weights, as YAML. Paths in one are relative to it.

sources:
  - {path: gsm8k.parquet, weight: 0.7}
  - {reasoning_gym: chain_sum, weight: 0.3, size: 1000, seed: 1, parameters: {max_terms: 3}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from hybridrl.data.sources.rows import shown
from hybridrl.errors import DataError

_PATH_KEYS = frozenset({"path", "weight"})
_GENERATOR_KEYS = frozenset({"reasoning_gym", "weight", "size", "seed", "parameters"})


@dataclass(frozen=True, slots=True)
class GeneratorSpec:
    """A reasoning-gym data set; see :mod:`hybridrl.data.sources.reasoning_gym`."""

    name: str
    size: int
    seed: int
    parameters: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class WeightedSource:
    """One source of a mixture.

    Attributes:
        where: What messages name.
        weight: Share of the prompts, relative to the other sources; above 0.
        origin: A file or folder, or a generator.
    """

    where: str
    weight: float
    origin: Path | GeneratorSpec


def read_mixture(path: Path) -> tuple[WeightedSource, ...]:
    """Read a mixture file.

    Raises:
        DataError: When it is not a mixture; lists the fault of each source as ``file: source n: fault``.
    """
    try:
        content = yaml.safe_load(path.read_bytes())
    except FileNotFoundError as e:
        raise DataError(f"{path}: no such file; expected a mixture of prompt sources") from e
    except (OSError, yaml.YAMLError) as e:
        raise DataError(f"{path}: not readable YAML ({' '.join(str(e).split())}); correct it") from e
    entries = content.get("sources") if isinstance(content, dict) and set(content) == {"sources"} else None
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{path}: got {shown(content)}, expected the one key sources, with a list of sources")
    sources: list[WeightedSource] = []
    problems: list[str] = []
    for number, entry in enumerate(entries, start=1):
        try:
            sources.append(_source(path, number, entry))
        except DataError as e:
            problems.append(f"{path}: source {number}: {e}")
    if problems:
        raise DataError("\n".join(problems))
    return tuple(sources)


def _source(path: Path, number: int, entry: object) -> WeightedSource:
    """Return a source.

    Raises:
        DataError: Saying what is wrong with it.
    """
    if not isinstance(entry, dict) or ("path" in entry) == ("reasoning_gym" in entry):
        raise DataError(f"got {shown(entry)}, expected one of path and reasoning_gym, with a weight")
    unknown = set(entry) - (_PATH_KEYS if "path" in entry else _GENERATOR_KEYS)
    if unknown:
        raise DataError(f"unknown key {', '.join(map(repr, sorted(unknown, key=str)))}; remove it")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise DataError(f"weight is {shown(weight)}, expected a number above 0")
    if "path" in entry:
        if not isinstance(entry["path"], str):
            raise DataError(f"path is {shown(entry['path'])}, expected text")
        origin = path.parent / entry["path"]
        return WeightedSource(str(origin), float(weight), origin)
    generator = _generator(entry)
    return WeightedSource(f"{path}:source {number} ({generator.name})", float(weight), generator)


def _generator(entry: Mapping[str, object]) -> GeneratorSpec:
    name, size, seed = entry["reasoning_gym"], entry.get("size"), entry.get("seed", 0)
    parameters = entry.get("parameters", {})
    if not isinstance(name, str):
        raise DataError(f"reasoning_gym is {shown(name)}, expected the name of a data set")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise DataError(f"size is {shown(size)}, expected the number of prompts to generate")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise DataError(f"seed is {shown(seed)}, expected a whole number >= 0")
    if not isinstance(parameters, dict):
        raise DataError(f"parameters is {shown(parameters)}, expected keys and values")
    return GeneratorSpec(name, size, seed, parameters)
