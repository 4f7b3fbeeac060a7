"""Training streams and evaluation prompts, from tasks and from files."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from hybridrl.config.choices import TaskName
from hybridrl.config.schema import DataConfig
from hybridrl.data.dataset import open_dataset
from hybridrl.data.stream import StreamState
from hybridrl.errors import DataError
from tests.unit.data.tokenizers import demo_tokenizer

TASKS = [TaskName.CALC, TaskName.REVERSE]


@pytest.mark.parametrize("task", TASKS)
def test_training_and_evaluation_prompts_of_a_task_do_not_meet(task: TaskName) -> None:
    dataset = open_dataset(DataConfig(task=task, num_eval_prompts=64), demo_tokenizer(), seed=1)
    assert all(zlib.crc32(prompt.text.encode()) % 10 == 0 for prompt in dataset.evaluation)
    assert all(zlib.crc32(prompt.text.encode()) % 10 != 0 for prompt in dataset.train.take(300))


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_prompts_differ_from_each_other_but_not_between_seeds(task: TaskName) -> None:
    first, second = (
        open_dataset(DataConfig(task=task, num_eval_prompts=64), demo_tokenizer(), seed=seed) for seed in (1, 2)
    )
    assert first.evaluation == second.evaluation
    assert len({prompt.text for prompt in first.evaluation}) == len({p.prompt_id for p in first.evaluation}) == 64
    assert first.train.take(10) != second.train.take(10)


def test_a_task_resumes_where_it_stopped() -> None:
    config = DataConfig(task=TaskName.CALC, num_eval_prompts=1)
    whole = open_dataset(config, demo_tokenizer(), seed=1).train.take(20)
    assert open_dataset(config, demo_tokenizer(), 1, StreamState(12, 0, 1)).train.take(8) == whole[12:]


def test_a_task_prompt_over_the_limit_is_an_error() -> None:
    with pytest.raises(
        DataError, match=r"task calc: prompt of 11 tokens, expected at most 5 \(data.max_prompt_tokens\)"
    ):
        open_dataset(DataConfig(task=TaskName.CALC, max_prompt_tokens=5), demo_tokenizer(), seed=1)


def test_more_evaluation_prompts_than_a_task_holds_out_are_an_error() -> None:
    with pytest.raises(
        DataError, match=r"task calc: got data.num_eval_prompts 145801, expected at most 145800, half of the questions"
    ):
        open_dataset(DataConfig(task=TaskName.CALC, num_eval_prompts=145_801), demo_tokenizer(), seed=1)


def file_config(folder: Path) -> DataConfig:
    for name, texts in (("train", "abc"), ("eval", "xyz")):
        rows = [json.dumps({"prompt": text, "answer": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return DataConfig(train_path=str(folder / "train.jsonl"), eval_path=str(folder / "eval.jsonl"), num_eval_prompts=2)


def test_prompts_of_a_file_keep_unique_ids_over_epochs(tmp_path: Path) -> None:
    taken = open_dataset(file_config(tmp_path), demo_tokenizer(), seed=1).train.take(6)
    assert sorted(prompt.text for prompt in taken) == list("aabbcc")
    assert len({prompt.prompt_id for prompt in taken}) == 6
    assert {prompt.prompt_id.rpartition("@")[2] for prompt in taken[3:]} == {"1"}


def test_evaluation_takes_the_first_prompts_of_its_file(tmp_path: Path) -> None:
    config = file_config(tmp_path)
    assert [p.text for p in open_dataset(config, demo_tokenizer(), seed=1).evaluation] == ["x", "y"]
    config.eval_path = None
    assert open_dataset(config, demo_tokenizer(), seed=1).evaluation == ()
