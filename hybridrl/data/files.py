"""Prompts from files: one file, one dataset folder, or a mixture; shuffled, or in the order of a curriculum.

Everything is read and checked when it is opened; after that the order alone is computed, from seed and position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.schema import DataConfig
from hybridrl.config.user_function import FunctionReference, find_reference, load_function
from hybridrl.data.prompts import AGENT_NAME, DATA_SOURCE, EXTRA_INFO, PromptFile, read_prompts
from hybridrl.data.sample import Prompt
from hybridrl.data.sources.mixture import GeneratorSpec, WeightedSource, read_mixture
from hybridrl.data.sources.reasoning_gym import generate_rows
from hybridrl.data.sources.rows import read_rows
from hybridrl.data.stream import MIX_BLOCK, Mixed, Order, Shuffle, Source, apportion
from hybridrl.data.tokenizer import Tokenizer
from hybridrl.errors import DataError

CURRICULUM_SIGNATURE = ("prompts: Sequence[Prompt]", "epoch: int")
_MIXTURE_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class WeightedFile:
    """The prompts of one source and its weight among the others."""

    file: PromptFile
    weight: float


def open_prompts(config: DataConfig, path: str, tokenizer: Tokenizer, seed: int) -> tuple[Source[Prompt], list[str]]:
    """Open an endless source of prompts.

    Returns:
        The source, and what a person should know about the files.

    Raises:
        DataError: When a file or the curriculum cannot be used.
    """
    files = read_sources(config, path, tokenizer)
    sources = [FilePrompts(each.file.prompts, seed, curriculum(config, each.file.prompts)) for each in files]
    notes = [note for each in files for note in each.file.notes()]
    if len(sources) == 1:
        return sources[0], notes
    weights = [each.weight for each in files]
    for each, count in zip(files, apportion(weights, MIX_BLOCK), strict=True):
        if count == 0:
            share = each.weight / sum(weights)
            raise DataError(f"{each.file.where}: weight is a share of {share:.2g}, expected at least {1 / MIX_BLOCK:g}")
    return Mixed(sources, weights, seed), notes


def read_sources(config: DataConfig, path: str, tokenizer: Tokenizer) -> list[WeightedFile]:
    """Read every prompt of a file, a dataset folder or a mixture.

    Raises:
        DataError: When a source cannot be used; names each faulty row.
    """
    if Path(path).suffix not in _MIXTURE_SUFFIXES:
        return [WeightedFile(_read(config, WeightedSource(path, 1.0, Path(path)), tokenizer), 1.0)]
    mixture = read_mixture(Path(path))
    files = [_read(config, source, tokenizer) for source in mixture]
    return [
        WeightedFile(replace(file, prompts=_numbered(file.prompts, number)), source.weight)
        for number, (file, source) in enumerate(zip(files, mixture, strict=True), start=1)
    ]


def curriculum(config: DataConfig, prompts: Sequence[Prompt]) -> Order | None:
    """Return the order of epochs that the configuration asks for; None for a random one.

    Raises:
        ConfigError: When there is no such function. Whatever its file raises passes through.
        DataError: From the order, when what the function returns is not a permutation.
    """
    if config.curriculum is None:
        return None
    reference = find_reference(config.curriculum, CURRICULUM_SIGNATURE)
    function = load_function(reference)
    return lambda epoch: _permutation(function(prompts, epoch), len(prompts), reference, epoch)


def _permutation(rows: Any, num_prompts: int, reference: FunctionReference, epoch: int) -> NDArray[np.int64]:
    order = np.asarray(rows)
    if order.dtype.kind not in "iu" or order.ndim != 1 or not np.array_equal(np.sort(order), np.arange(num_prompts)):
        raise DataError(
            f"data.curriculum: {reference} returned {order.dtype} of shape {list(order.shape)} in epoch {epoch}, expected "
            f"every row index from 0 to {num_prompts - 1} once"
        )
    return order.astype(np.int64)


class FilePrompts:
    """Prompts of one source, in a new order each epoch; see :class:`Source`."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, order: Order | None = None) -> None:
        self._prompts = prompts
        self._shuffle = Shuffle(len(prompts), seed, order)
        self.seed = seed

    @property
    def num_items(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position; its id carries the epoch, since an id is unique within a run."""
        epoch, index = self._shuffle.at(position)
        prompt = self._prompts[index]
        return replace(prompt, prompt_id=f"{prompt.prompt_id}@{epoch}")


def _read(config: DataConfig, source: WeightedSource, tokenizer: Tokenizer) -> PromptFile:
    columns = (config.prompt_key, config.answer_key)
    if isinstance(source.origin, GeneratorSpec):
        spec = source.origin
        rows = generate_rows(source.where, spec.name, spec.size, spec.seed, spec.parameters, columns)
        return read_prompts(source.where, rows, replace(config, id_key=None), tokenizer)
    required = (*columns, *([] if config.id_key is None else [config.id_key]))
    rows = read_rows(source.origin, required, (DATA_SOURCE, EXTRA_INFO, AGENT_NAME))
    return read_prompts(source.where, rows, config, tokenizer)


def _numbered(prompts: Sequence[Prompt], number: int) -> tuple[Prompt, ...]:
    """Make ids unique among the sources of a mixture."""
    return tuple(replace(prompt, prompt_id=f"{number}/{prompt.prompt_id}") for prompt in prompts)
