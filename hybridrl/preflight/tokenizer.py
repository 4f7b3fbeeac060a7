"""Does the model's tokenizer have what the task needs of it?"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hybridrl.agents import make_agent_loop
from hybridrl.config.choices import TaskName
from hybridrl.config.schema import ExperimentConfig
from hybridrl.data.tasks import generated_task
from hybridrl.data.tokenizer import FastTokenizer, load_tokenizer
from hybridrl.errors import DataError
from hybridrl.preflight.command import Command
from hybridrl.preflight.report import Report
from hybridrl.rewards.tasks import task_reward


def check_tokenizer(report: Report, config: ExperimentConfig, command: Command, folder: Path) -> FastTokenizer | None:
    """Check the tokenizer of a model folder; returns it when it can be used."""
    task = config.data.task
    try:
        tokenizer = load_tokenizer(folder)
        make_agent_loop(task, tokenizer)
        if command is Command.TRAIN:
            _check_reward_is_in_reach(task, tokenizer, folder)
    except DataError as e:
        expected = f"a tokenizer for data.task {task.value}"
        report.add("model.path", folder, expected, str(e), related=("data.task",), is_need=True)
        return None
    return tokenizer


def _check_reward_is_in_reach(name: TaskName, tokenizer: FastTokenizer, folder: Path) -> None:
    """Write a right response of a generated task in tokens, read it back, and see that it is rewarded.

    Raises:
        DataError: When it is not: every sample would earn 0.
    """
    task, reward = generated_task(name), task_reward(name)
    if task is None or reward is None:
        return
    question = task.draw(np.random.default_rng(0))
    eos = tokenizer.decode([tokenizer.eos_id])
    response = "".join(segment.text for segment in task.demonstrate(question, shows_skill=True, eos=eos))
    read = tokenizer.decode(tokenizer.encode(response))
    if reward(read, question.answer) == 0:
        raise DataError(
            f"{folder / 'tokenizer.json'}: a right response reads {read!r} in its tokens, which earns no reward; "
            "use the demo tokenizer, or prompts of your own (data.task: file)"
        )
