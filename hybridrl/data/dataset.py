"""The prompts of a run: an endless training stream and fixed evaluation prompts, from files or a generated task."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, replace

import numpy as np

from hybridrl.config.schema import DataConfig
from hybridrl.data.files import open_prompts, read_sources
from hybridrl.data.sample import Prompt
from hybridrl.data.stream import Stream, StreamState, apportion
from hybridrl.data.tasks import generated_task
from hybridrl.data.tasks.task import GeneratedTask, Question, draw_question, max_held_out
from hybridrl.data.tokenizer import Tokenizer
from hybridrl.errors import DataError

# Evaluation prompts do not depend on the run's seed, so that accuracies of runs can be compared.
_EVAL_SEED = 0


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a run trains and evaluates on.

    Attributes:
        train: Endless; each prompt drawn has an id of its own, also in later epochs.
        evaluation: Held out; empty when there is no evaluation file.
        notes: What a person should know about the files, one line each.
    """

    train: Stream[Prompt]
    evaluation: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()


def open_dataset(config: DataConfig, tokenizer: Tokenizer, seed: int, state: StreamState | None = None) -> Dataset:
    """Open the prompts of a run.

    Args:
        seed: Decides the order (files) or the questions (generated tasks) of training.
        state: Where to resume; the start when None.

    Raises:
        DataError: When a file cannot be used; names each faulty row.
    """
    task = generated_task(config.task)
    if task is not None:
        source = TaskPrompts(task, tokenizer, config.max_prompt_tokens, seed)
        return Dataset(Stream(source, state), source.evaluation(config.num_eval_prompts))
    assert config.train_path is not None, config
    evaluation, eval_notes = _evaluation(config, tokenizer)
    train, notes = open_prompts(config, config.train_path, tokenizer, seed)
    return Dataset(Stream(train, state), evaluation, (*notes, *eval_notes))


def _evaluation(config: DataConfig, tokenizer: Tokenizer) -> tuple[tuple[Prompt, ...], list[str]]:
    """Return the first prompts of the evaluation file, of a mixture the first of each source by its weight, and notes."""
    if config.eval_path is None:
        return (), []
    sources = read_sources(config, config.eval_path, tokenizer)
    counts = apportion([source.weight for source in sources], config.num_eval_prompts)
    chosen = [p for source, count in zip(sources, counts, strict=True) for p in source.file.prompts[:count]]
    notes = [note for source in sources for note in source.file.notes()]
    return tuple(replace(prompt, prompt_id=f"eval/{prompt.prompt_id}") for prompt in chosen), notes


class TaskPrompts:
    """Prompts of a generated task, none of them held out; see :class:`Source`."""

    num_items = None

    def __init__(self, task: GeneratedTask, tokenizer: Tokenizer, max_prompt_tokens: int, seed: int) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self.seed = seed

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position."""
        question = draw_question(self._task, task_rng(self._task, self.seed, position), is_held_out=False)
        return self._prompt(question, f"{self._task.name}-{position}")

    def evaluation(self, count: int) -> tuple[Prompt, ...]:
        """Return `count` different held-out prompts, which the run's seed does not change.

        Raises:
            DataError: When the task does not hold out that many.
        """
        limit = max_held_out(self._task)
        if count > limit:
            raise DataError(
                f"task {self._task.name}: got data.num_eval_prompts {count}, expected at most {limit}, half of the questions "
                "that it holds out; lower it"
            )
        found: dict[str, Question] = {}
        for position in itertools.count():
            if len(found) == count:
                break
            question = draw_question(self._task, task_rng(self._task, _EVAL_SEED, position), is_held_out=True)
            found.setdefault(question.text, question)
        return tuple(self._prompt(question, f"eval/{index}") for index, question in enumerate(found.values()))

    def _prompt(self, question: Question, prompt_id: str) -> Prompt:
        """Tokenise a question.

        Raises:
            DataError: When it is over the limit.
        """
        token_ids = self._tokenizer.encode_prompt(question.text)
        if len(token_ids) > self._max_prompt_tokens:
            limit = f"at most {self._max_prompt_tokens} (data.max_prompt_tokens); raise the limit"
            raise DataError(f"task {self._task.name}: prompt of {len(token_ids)} tokens, expected {limit}")
        return Prompt(prompt_id, token_ids, question.text, question.answer, self._task.name, self._task.name)


def task_rng(task: GeneratedTask, seed: int, position: int) -> np.random.Generator:
    """Return the random numbers of one position of a task."""
    return np.random.default_rng([seed, zlib.crc32(task.name.encode()), position])
