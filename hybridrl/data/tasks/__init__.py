"""Generated tasks, one file each."""

from __future__ import annotations

from hybridrl.config.choices import TaskName
from hybridrl.data.tasks.calc import CalcTask
from hybridrl.data.tasks.reverse import ReverseTask
from hybridrl.data.tasks.task import GeneratedTask

_TASKS: dict[TaskName, GeneratedTask] = {TaskName.CALC: CalcTask(), TaskName.REVERSE: ReverseTask()}


def generated_task(name: TaskName) -> GeneratedTask | None:
    """Return the generated task of that name; None for prompts from files."""
    return _TASKS.get(name)
