"""Prompts that reasoning-gym generates: one of its data sets by name, of a stated size and seed.

reasoning-gym is optional (``requirements/reasoning-gym.txt``). Its whole entry goes along as ``extra_info``, from which
:mod:`hybridrl.rewards.answers` scores a response with the data set's own rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.data.sources.rows import Row
from hybridrl.errors import DataError

PREFIX = "reasoning_gym/"


def generate_rows(
    where: str, name: str, size: int, seed: int, parameters: Mapping[str, object], columns: tuple[str, str]
) -> Iterator[tuple[int, Row]]:
    """Yield the entries of a reasoning-gym data set.

    Args:
        where: What messages name.
        parameters: Settings of the data set.
        columns: Names under which rows hold the question and the answer.

    Raises:
        DataError: When reasoning-gym is not installed, has no such data set, or refuses the parameters, or when entries of
            the data set score differently once they have been written as JSON (arc_agi and rearc do).
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as e:
        raise DataError(
            f"{where}: reasoning-gym is not installed ({e}); pip install -r requirements/reasoning-gym.txt"
        ) from e
    if name not in DATASETS:
        raise DataError(
            f"{where}: reasoning-gym has no data set {name!r}, expected one of {', '.join(sorted(DATASETS))}"
        )
    try:
        entries = reasoning_gym.create_dataset(name, size=size, seed=seed, **parameters)
    except (AssertionError, TypeError, ValueError) as e:
        raise DataError(f"{where}: reasoning-gym refuses the parameters {dict(parameters)} ({e}); correct them") from e
    question, answer = columns
    for index in range(size):
        item = entries[index]
        entry = {key: item[key] for key in ("question", "answer", "metadata")}
        if index == 0 and not _survives_json(entries, entry):
            raise DataError(
                f"{where}: entries of {name} do not survive JSON, so rewards would be wrong; choose another"
            )
        row = {question: entry["question"], answer: "" if entry["answer"] is None else str(entry["answer"])}
        yield index + 1, {**row, "data_source": f"{PREFIX}{name}", "extra_info": entry}


def _survives_json(entries: Any, entry: Mapping[str, object]) -> bool:
    """Return whether the right answer earns the same by an entry as it will be handed to the reward."""
    try:
        restored = json.loads(json.dumps(entry))
    except (TypeError, ValueError):
        return False
    answer = entry["answer"]
    return bool(entries.score_answer(answer, restored) == entries.score_answer(answer, entry))
