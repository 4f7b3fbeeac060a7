"""Every kind of source, the policies for long prompts, mixtures and curricula; each fault names its file and row."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridrl.config.choices import LongPrompts
from hybridrl.config.schema import DataConfig
from hybridrl.data.dataset import Dataset, open_dataset
from hybridrl.data.sample import Prompt
from hybridrl.data.stream import StreamState
from hybridrl.errors import DataError
from tests.unit.data.tokenizers import demo_tokenizer

VERL = {
    "data_source": "demo/sums",
    "prompt": [{"role": "user", "content": "1+2"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train", "index": 7},
    "agent_name": "single_turn_agent",
}
VERL_KEYS = {"answer_key": "reward_model.ground_truth", "max_prompt_tokens": 16}


def opened(path: Path, *, seed: int = 1, state: StreamState | None = None, **settings: object) -> Dataset:
    config = DataConfig(train_path=str(path), **settings)  # type: ignore[arg-type]
    return open_dataset(config, demo_tokenizer(has_chat=True), seed, state)


def first(path: Path, **settings: object) -> Prompt:
    return opened(path, **settings).train.take(1)[0]


def fault(path: Path, **settings: object) -> str:
    with pytest.raises(DataError) as caught:
        opened(path, **settings).train.take(1)
    return str(caught.value)


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_arrow(folder: Path, *tables: pa.Table, **state: object) -> Path:
    """Write what ``datasets.save_to_disk`` writes."""
    folder.mkdir()
    names = [f"data-{index:05d}-of-{len(tables):05d}.arrow" for index in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], **state}))
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_the_schema_of_verl_is_read_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"train.{kind}"
    if kind == "jsonl":
        write_lines(path, VERL)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist([VERL]), path)
    else:
        write_arrow(path, pa.Table.from_pylist([VERL]))
    prompt = first(path, **VERL_KEYS)
    assert (prompt.text, prompt.answer, prompt.data_source) == ("<bos>u:1+2=", "3", "demo/sums")
    assert demo_tokenizer().decode(prompt.token_ids) == "<bos>u:1+2="
    assert json.loads(prompt.extra_info) == {"split": "train", "index": 7}


def test_rows_of_a_dataset_folder_are_counted_over_its_files(tmp_path: Path) -> None:
    good, bad = {"prompt": "1", "answer": "1"}, {"prompt": "", "answer": "1"}
    folder = write_arrow(tmp_path / "set", pa.Table.from_pylist([good, good]), pa.Table.from_pylist([good, bad]))
    assert fault(folder) == f"{folder}:4: 'prompt' is empty, expected a prompt; fill it in or remove the row"


def test_text_can_become_a_chat_with_a_system_message(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "1+2", "answer": "3"})
    assert first(path).text == "1+2"
    assert first(path, text_as_chat=True).text == "<bos>u:1+2="
    assert first(path, text_as_chat=True, system_prompt="be").text == "<bos>s:beu:1+2="
    own = write_lines(tmp_path / "b.jsonl", {**VERL, "prompt": [{"role": "system", "content": "x"}, *VERL["prompt"]]})  # type: ignore[misc]
    assert first(own, system_prompt="be", answer_key="reward_model.ground_truth").text == "<bos>s:xu:1+2="


LONG = [{"prompt": "1234", "answer": "1"}, {"prompt": "123456", "answer": "2"}]


@pytest.mark.parametrize(
    ("policy", "texts", "note"),
    [
        (LongPrompts.DROP, ["1234"], "1 long prompts: drop"),
        (LongPrompts.TRUNCATE_LEFT, ["1234", "23456"], "1 long prompts: truncate_left"),
        (LongPrompts.TRUNCATE_RIGHT, ["1234", "<bos>1234"], "1 long prompts: truncate_right"),
    ],
)
def test_long_prompts_are_dropped_or_cut_and_counted(
    tmp_path: Path, policy: LongPrompts, texts: list[str], note: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", *LONG)
    dataset = opened(path, max_prompt_tokens=5, long_prompts=policy)
    assert sorted(prompt.text for prompt in dataset.train.take(len(texts))) == sorted(texts)
    assert all(len(prompt.token_ids) <= 5 for prompt in dataset.train.take(4))
    assert dataset.notes == (f"{path}: {note}",)


def test_a_file_of_which_nothing_is_left_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", LONG[1])
    got = fault(path, max_prompt_tokens=5, long_prompts=LongPrompts.DROP)
    assert got == f"{path}: all 1 prompts are over data.max_prompt_tokens 5; expected at least one prompt"


MESSAGE = "a role (system, user, assistant, tool) and content that is text"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "'prompt' is a chat without a last message to answer; add one or remove the row"),
        ({"prompt": [{"role": "user", "content": " "}]}, "'prompt' is a chat without a last message to answer"),
        ({"prompt": [{"role": "assistant", "content": "1"}]}, "'prompt' is a chat without a last message to answer"),
        ({"prompt": ["hello"]}, f"'prompt' message 0 is 'hello', expected {MESSAGE}"),
        ({"prompt": [{"role": "robot", "content": "1"}]}, "'prompt' message 0 is {'role': 'robot', 'content': '1'}"),
        ({"prompt": [{"role": "user", "content": None}]}, "'prompt' message 0 is {'role': 'user', 'content': None}"),
        ({"prompt": [{"role": "user", "content": "\ud800"}]}, "'prompt' message 0 is {'role': 'user', 'content': "),
        ({"prompt": [{"role": "user", "content": "1" * 20}]}, "prompt of 24 tokens, expected at most 16 (data.max_p"),
        ({"prompt": {"role": "user"}}, "'prompt' is {'role': 'user'}, expected text or a list of chat messages"),
        ({"reward_model": {}}, "no key 'reward_model.ground_truth' (keys: 'data_source', 'prompt', "),
        ({"reward_model": "3"}, "no key 'reward_model.ground_truth'"),
        ({"reward_model": {"ground_truth": None}}, "'reward_model.ground_truth' is null, expected the answer"),
        (
            {"reward_model": {"ground_truth": {"a": 1}}},
            "'reward_model.ground_truth' is {'a': 1}, expected text or a nu",
        ),
        ({"data_source": 5}, "'data_source' is 5, expected the name of a data set"),
        ({"agent_name": "tool_agent"}, "'agent_name' is 'tool_agent', expected single_turn; other agent loops do not"),
    ],
)
def test_a_faulty_row_of_verls_schema_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", VERL, {**VERL, **change})
    assert fault(path, **VERL_KEYS).startswith(f"{path}:2: {message}")


def test_faulty_dataset_folders_are_explained(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"prompt": "1", "answer": "1"}])
    (tmp_path / "empty").mkdir()
    assert fault(tmp_path / "empty").startswith(f"{tmp_path}/empty: has no state.json, expected a folder written by")
    (tmp_path / "dict" / "test").mkdir(parents=True)
    (tmp_path / "dict" / "dataset_dict.json").write_text("{}")
    assert fault(tmp_path / "dict").startswith(f"{tmp_path}/dict: holds several splits (test), expected one")
    chosen = write_arrow(tmp_path / "chosen", table, _indices_data_files=[{"filename": "indices.arrow"}])
    assert fault(chosen).endswith("save it again after flatten_indices()")
    torn = write_arrow(tmp_path / "torn", table)
    (torn / "data-00000-of-00001.arrow").write_bytes(b"torn")
    assert fault(torn).startswith(f"{torn}: not a readable dataset (")
    (torn / "state.json").write_text("[]")
    assert fault(torn).startswith(f"{torn}/state.json: not the state of a dataset (")
    named = write_arrow(tmp_path / "named", pa.Table.from_pylist([{"question": "1", "answer": "1"}]))
    assert "no column 'prompt', the file has 'question', 'answer'; set data.*_key" in fault(named)


def mixture(folder: Path, text: str) -> Path:
    for name, count in (("a", 3), ("b", 2)):
        write_lines(folder / f"{name}.jsonl", *[{"prompt": f"{name}{i}", "answer": "1"} for i in range(count)])
    path = folder / "mix.yaml"
    path.write_text(text)
    return path


TWO = "sources:\n  - {path: a.jsonl, weight: 3}\n  - {path: b.jsonl}\n"


def test_a_mixture_draws_from_its_sources_by_weight_and_resumes_exactly(tmp_path: Path) -> None:
    path = mixture(tmp_path, TWO)
    stream = opened(path).train
    taken = stream.take(1000)
    assert Counter(prompt.text[0] for prompt in taken) == {"a": 750, "b": 250}
    assert len({prompt.prompt_id for prompt in taken}) == 1000
    assert opened(path, state=stream.state).train.take(50) == stream.take(50)


def test_evaluation_on_a_mixture_shares_its_prompts_by_weight(tmp_path: Path) -> None:
    path = mixture(tmp_path, TWO)
    evaluation = opened(path, eval_path=str(path), num_eval_prompts=4).evaluation
    assert [prompt.text for prompt in evaluation] == ["a0", "a1", "a2", "b0"]
    assert len({prompt.prompt_id for prompt in evaluation}) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sources: [", ": not readable YAML ("),
        ("[]", ": got [], expected the one key sources, with a list of sources"),
        ("sources: []", ": got {'sources': []}, expected the one key sources"),
        ("sources: [a.jsonl]", ": source 1: got 'a.jsonl', expected one of path and reasoning_gym, with a weight"),
        ("sources: [{path: a.jsonl, heft: 1}]", ": source 1: unknown key 'heft'; remove it"),
        ("sources: [{path: a.jsonl, weight: 0}]", ": source 1: weight is 0, expected a number above 0"),
        ("sources: [{path: 3}]", ": source 1: path is 3, expected text"),
        ("sources: [{reasoning_gym: 3, size: 1}]", ": source 1: reasoning_gym is 3, expected the name of a data set"),
        ("sources: [{reasoning_gym: x}]", ": source 1: size is None, expected the number of prompts to generate"),
        ("sources: [{reasoning_gym: x, size: 1, seed: -1}]", ": source 1: seed is -1, expected a whole number >= 0"),
        ("sources: [{reasoning_gym: x, size: 1, parameters: 2}]", ": source 1: parameters is 2, expected keys and va"),
    ],
)
def test_a_faulty_mixture_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = mixture(tmp_path, text)
    assert fault(path).startswith(f"{path}{message}")


def test_a_source_with_too_small_a_share_is_an_error(tmp_path: Path) -> None:
    path = mixture(tmp_path, TWO.replace("weight: 3", "weight: 0.0001"))
    assert fault(path) == f"{tmp_path}/a.jsonl: weight is a share of 0.0001, expected at least 0.001"


def test_a_missing_file_of_a_mixture_is_named(tmp_path: Path) -> None:
    path = mixture(tmp_path, "sources: [{path: a.jsonl}, {path: c.jsonl}]")
    assert fault(path).startswith(f"{tmp_path}/c.jsonl: no such file; expected a .jsonl or .parquet file")


def test_reasoning_gym_generates_the_same_prompts_each_time(tmp_path: Path) -> None:
    gym = pytest.importorskip("reasoning_gym")
    path = mixture(tmp_path, "sources: [{reasoning_gym: chain_sum, size: 5, seed: 3, parameters: {max_terms: 2}}]")
    taken = opened(path).train.take(5)
    entries = list(gym.create_dataset("chain_sum", size=5, seed=3, max_terms=2))
    assert {prompt.text: prompt.answer for prompt in taken} == {e["question"]: e["answer"] for e in entries}
    assert {prompt.data_source for prompt in taken} == {"reasoning_gym/chain_sum"}
    assert all(json.loads(prompt.extra_info)["metadata"] for prompt in taken)
    path.write_text("sources: [{reasoning_gym: rearc, size: 1}]")
    assert "entries of rearc do not survive JSON, so rewards would be wrong" in fault(path)
    path.write_text("sources: [{reasoning_gym: no_such, size: 1}]")
    assert "reasoning-gym has no data set 'no_such', expected one of " in fault(path)
    path.write_text("sources: [{reasoning_gym: chain_sum, size: 1, parameters: {nothing: 1}}]")
    assert "reasoning-gym refuses the parameters {'nothing': 1}" in fault(path)


CURRICULUM = """
def by_length(prompts, epoch):
    return sorted(range(len(prompts)), key=lambda i: len(prompts[i].text), reverse=epoch > 0)
def twice(prompts, epoch): return [0] * len(prompts)
def names(prompts, epoch): return ["a"] * len(prompts)
"""


def test_a_curriculum_orders_each_epoch_and_resumes_exactly(tmp_path: Path) -> None:
    (tmp_path / "order.py").write_text(CURRICULUM)
    path = write_lines(tmp_path / "a.jsonl", *[{"prompt": text, "answer": "1"} for text in ("111", "1", "11")])
    curriculum = f"{tmp_path}/order.py:by_length"
    stream = opened(path, curriculum=curriculum).train
    assert [p.text for p in stream.take(4)] == ["1", "11", "111", "111"]
    resumed = opened(path, curriculum=curriculum, state=stream.state).train
    assert [p.text for p in resumed.take(2)] == ["11", "1"]


@pytest.mark.parametrize("name", ["twice", "names"])
def test_a_curriculum_that_is_no_order_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "order.py").write_text(CURRICULUM)
    path = write_lines(tmp_path / "a.jsonl", *LONG)
    got = fault(path, curriculum=f"{tmp_path}/order.py:{name}")
    assert got.startswith(f"data.curriculum: {tmp_path}/order.py:{name} returned ")
    assert got.endswith(" in epoch 0, expected every row index from 0 to 1 once")
