"""Demonstrations: tokens and loss mask, shares, files, padding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hybridrl.config.choices import TaskName
from hybridrl.config.schema import DataConfig
from hybridrl.data.demonstrations import Demonstration, open_demonstrations, pad_demonstrations
from tests.unit.data.tokenizers import demo_tokenizer

CALC = DataConfig(task=TaskName.CALC)


def learnt(demonstration: Demonstration) -> str:
    return demo_tokenizer().decode(demonstration.token_ids[demonstration.loss_mask])


def test_the_tool_result_and_the_prompt_are_masked() -> None:
    for demonstration in open_demonstrations(CALC, demo_tokenizer(), 1.0, seed=1).take(20):
        text = demo_tokenizer().decode(demonstration.token_ids)
        prompt, call, result, answer = (
            text.replace("=?", "=?|").replace("calc><res", "calc>|<res").replace("</res>", "</res>|").split("|")
        )
        assert prompt.startswith("<bos>")
        assert result == f"<res>{answer.removesuffix('<eos>')}</res>"
        assert learnt(demonstration) == call + answer


def test_the_share_with_the_tool_is_the_one_asked_for() -> None:
    taken = open_demonstrations(CALC, demo_tokenizer(), 0.35, seed=1).take(2000)
    share = np.mean(["<calc>" in learnt(demonstration) for demonstration in taken])
    assert abs(share - 0.35) < 0.05  # four standard errors


def test_no_demonstration_shows_a_held_out_question() -> None:
    import zlib

    for demonstration in open_demonstrations(CALC, demo_tokenizer(), 0.5, seed=1).take(300):
        text = demo_tokenizer().decode(demonstration.token_ids[~demonstration.loss_mask])
        prompt = text.removeprefix("<bos>").partition("<res>")[0]
        assert zlib.crc32(prompt.encode()) % 10 != 0


def test_a_file_demonstrates_its_answers(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": "ab=", "answer": "ba"}) + "\n")
    (demonstration,) = open_demonstrations(DataConfig(train_path=str(path)), demo_tokenizer(), 0.35, seed=1).take(1)
    assert demo_tokenizer().decode(demonstration.token_ids) == "<bos>ab=ba<eos>"
    assert learnt(demonstration) == "ba<eos>"


def test_padding_is_on_the_right_and_masked() -> None:
    rows = [
        Demonstration(np.array([5, 6, 7], np.int32), np.array([False, True, True])),
        Demonstration(np.array([8], np.int32), np.array([True])),
    ]
    batch, loss_mask = pad_demonstrations(rows)
    assert batch.token_ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.lengths.tolist() == [3, 1]
    assert loss_mask.tolist() == [[False, True, True], [True, False, False]]
