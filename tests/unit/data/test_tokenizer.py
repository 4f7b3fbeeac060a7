"""Text to tokens and back; special tokens are tokens; damaged files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.data.tasks.demo_tokenizer import (
    CHARACTERS,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    demo_vocabulary,
    write_demo_tokenizer,
)
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.errors import DataError
from tests.unit.data.tokenizers import demo_tokenizer

TOKENS = st.lists(st.sampled_from([*CHARACTERS, *SPECIAL_TOKENS]))


@given(TOKENS)
def test_decoding_what_was_encoded_gives_the_text_and_one_token_per_character(tokens: list[str]) -> None:
    text = "".join(tokens)
    token_ids = demo_tokenizer().encode(text)
    assert token_ids == tuple(demo_vocabulary()[token] for token in tokens)
    assert demo_tokenizer().decode(token_ids) == text


@given(st.lists(st.integers(0, VOCAB_SIZE - 1)))
def test_encoding_what_was_decoded_gives_the_tokens(token_ids: list[int]) -> None:
    assert demo_tokenizer().encode(demo_tokenizer().decode(token_ids)) == tuple(token_ids)


def test_a_prompt_starts_with_bos() -> None:
    tokenizer = demo_tokenizer()
    assert tokenizer.encode_prompt("1+2") == (tokenizer.token_id("<bos>"), *tokenizer.encode("1+2"))


def test_the_vocabulary_has_64_tokens() -> None:
    assert demo_tokenizer().vocab_size == len(demo_vocabulary()) == VOCAB_SIZE


def test_characters_outside_the_vocabulary_become_unk() -> None:
    assert demo_tokenizer().encode("A") == (demo_tokenizer().token_id("<unk>"),)


def test_transformers_reads_the_same_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_demo_tokenizer(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    text = "12+34-56=?<calc>1 \n(x)</calc><res>-7</res>-7<eos>"
    assert tuple(other(text).input_ids) == demo_tokenizer().encode_prompt(text)
    assert other.decode(demo_tokenizer().encode(text)) == text
    assert (other.eos_token_id, other.pad_token_id) == (demo_tokenizer().eos_id, 0)


def test_stop_tokens_come_from_both_files_without_repetition(tmp_path: Path) -> None:
    write_demo_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert load_tokenizer(tmp_path).stop_token_ids == (2, 5)


def test_an_unknown_token_is_named() -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json: the vocabulary has no token '<tool>'"):
        demo_tokenizer().token_id("<tool>")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json: no such file; expected a Hugging Face fast tokenizer"),
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer ("),
        ("tokenizer_config.json", None, "tokenizer_config.json: no such file; copy it from the checkpoint"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not valid JSON ("),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: got list, expected a JSON object"),
        ("tokenizer_config.json", "{}", "tokenizer_config.json: eos_token is None, expected the text of the token"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', "tokenizer.json: the vocabulary has no token '<end>'"),
        ("generation_config.json", '{"eos_token_id": 99}', "generation_config.json: eos_token_id 99 is not in the"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    write_demo_tokenizer(tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")
