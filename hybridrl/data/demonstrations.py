"""Demonstrations for supervised fine-tuning: token ids and which of them the policy is to learn.

Worked example (calc, with skill): ``<bos>12+34-56=?`` masked, ``<calc>12+34-56</calc>`` learnt, ``<res>-10</res>``
masked, ``-10<eos>`` learnt. The tokens are the same, one by one, as those of a rollout that says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridrl.config.schema import DataConfig
from hybridrl.data.batch import SequenceBatch, pad_rows
from hybridrl.data.dataset import task_rng
from hybridrl.data.files import open_prompts
from hybridrl.data.sample import Prompt
from hybridrl.data.stream import Mapped, Stream
from hybridrl.data.tasks import generated_task
from hybridrl.data.tasks.task import GeneratedTask, draw_question
from hybridrl.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and a correct response.

    Attributes:
        token_ids: [num_tokens] int32.
        loss_mask: [num_tokens] bool; True where the policy is to learn the token.
    """

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


def open_demonstrations(
    config: DataConfig, tokenizer: Tokenizer, tool_fraction: float, seed: int
) -> Stream[Demonstration]:
    """Open the endless stream of demonstrations of a run; in files, the answer is the response.

    Args:
        tool_fraction: Share of a generated task's demonstrations that show the rewarded behaviour.

    Raises:
        DataError: When a file cannot be used; names each faulty row.
    """
    task = generated_task(config.task)
    if task is not None:
        return Stream(TaskDemonstrations(task, tokenizer, tool_fraction, seed))
    assert config.train_path is not None, config
    prompts, _ = open_prompts(config, config.train_path, tokenizer, seed)
    return Stream(Mapped(prompts, lambda prompt: _file_demonstration(prompt, tokenizer)))


class TaskDemonstrations:
    """Demonstrations of a generated task, on questions that are not held out; see :class:`Source`."""

    num_items = None

    def __init__(self, task: GeneratedTask, tokenizer: Tokenizer, tool_fraction: float, seed: int) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._tool_fraction = tool_fraction
        self.seed = seed

    def at(self, position: int) -> Demonstration:
        """Return the demonstration at a position."""
        rng = task_rng(self._task, self.seed, position)
        question = draw_question(self._task, rng, is_held_out=False)
        shows_skill = bool(rng.random() < self._tool_fraction)
        eos = self._tokenizer.decode([self._tokenizer.eos_id])
        parts = [(self._tokenizer.encode_prompt(question.text), False)]
        for segment in self._task.demonstrate(question, shows_skill=shows_skill, eos=eos):
            parts.append((self._tokenizer.encode(segment.text), segment.is_policy))
        return _demonstration(parts)


def pad_demonstrations(rows: Sequence[Demonstration]) -> tuple[SequenceBatch, NDArray[np.bool_]]:
    """Return right-padded sequences and their [num_samples, max_tokens] bool loss mask."""
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int32)
    width = int(lengths.max())
    token_ids = pad_rows([row.token_ids for row in rows], width, np.int32)
    loss_mask = pad_rows([row.loss_mask for row in rows], width, np.bool_)
    return SequenceBatch(token_ids, lengths), loss_mask


def _file_demonstration(prompt: Prompt, tokenizer: Tokenizer) -> Demonstration:
    response = (*tokenizer.encode(prompt.answer), tokenizer.eos_id)
    return _demonstration([(prompt.token_ids, False), (response, True)])


def _demonstration(parts: Sequence[tuple[tuple[int, ...], bool]]) -> Demonstration:
    token_ids = np.concatenate([np.array(tokens, dtype=np.int32) for tokens, _ in parts])
    loss_mask = np.concatenate([np.full(len(tokens), is_policy, dtype=np.bool_) for tokens, is_policy in parts])
    return Demonstration(token_ids, loss_mask)
