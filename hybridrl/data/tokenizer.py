"""Text to token ids and back, from a checkpoint's ``tokenizer.json`` through the `tokenizers` package.

Prompts are encoded once, on the controller; after that the system carries token ids. Decoding shows special tokens, so
that what a person or a reward function reads is what the policy wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import tokenizers

from hybridrl.data.chat import ChatTemplate, Message
from hybridrl.errors import DataError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer(Protocol):
    """What prompts, agent loops and demonstrations need of a tokenizer."""

    @property
    def eos_id(self) -> int:
        """The token that ends a response."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a response, `eos_id` first."""
        ...

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Encode the start of a sequence, with the tokens that the tokenizer puts first."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode text that continues a sequence; special tokens in it become their ids."""
        ...

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Return a chat as text for :meth:`encode`: its template writes every special token, the first ones as well.

        Raises:
            DataError: When the tokenizer has no chat template, or the template refuses the messages.
        """
        ...

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of tokens, special tokens shown."""
        ...

    def token_id(self, token: str) -> int:
        """Return the id of one token.

        Raises:
            DataError: When the vocabulary has no such token.
        """
        ...


class FastTokenizer:
    """A ``tokenizer.json``; see :class:`Tokenizer`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        stop_tokens: tuple[str, ...],
        where: str,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self._where = where
        self._chat_template = chat_template
        self.stop_token_ids = tuple(self.token_id(token) for token in stop_tokens)

    @property
    def eos_id(self) -> int:
        """The token that ends a response."""
        return self.stop_token_ids[0]

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def vocabulary(self) -> dict[str, int]:
        """Number of each token, added tokens included."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Encode the start of a sequence, with the tokens that the tokenizer puts first."""
        return tuple(self._backend.encode(text, add_special_tokens=True).ids)

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode text that continues a sequence; special tokens in it become their ids."""
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Return a chat as text for :meth:`encode`, by the template of the checkpoint.

        Raises:
            DataError: When there is no chat template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise DataError(
                f"{self._where}: has no chat template, expected chat_template.jinja beside it; use text prompts"
            )
        return self._chat_template.render(messages)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of tokens, special tokens shown."""
        return str(self._backend.decode([int(token) for token in token_ids], skip_special_tokens=False))

    def token_id(self, token: str) -> int:
        """Return the id of one token.

        Raises:
            DataError: When the vocabulary has no such token.
        """
        found = self._backend.token_to_id(token)
        if found is None:
            raise DataError(f"{self._where}: the vocabulary has no token {token!r}; use a tokenizer that has it")
        return int(found)


def load_tokenizer(folder: Path) -> FastTokenizer:
    """Load the tokenizer of a checkpoint folder.

    Stop tokens are the ``eos_token`` of ``tokenizer_config.json`` and each ``eos_token_id`` of
    ``generation_config.json``.

    Raises:
        DataError: When a file is missing or damaged, or no end-of-sequence token is declared.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected a Hugging Face fast tokenizer in the model folder")
    try:
        backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except ValueError as e:
        raise DataError(f"{path}: not a tokenizer ({e}); copy the file from the checkpoint again") from e
    return FastTokenizer(backend, _stop_tokens(folder, backend), str(path), _chat_template(folder))


def _chat_template(folder: Path) -> ChatTemplate | None:
    """Return the template in ``chat_template.jinja`` or in ``tokenizer_config.json``; of several, the one named default."""
    config_path, path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = _read_json(config_path)
    source: object = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
        source = named.get("default")
    if source is None:
        return None
    where = path if path.is_file() else config_path
    if not isinstance(source, str):
        raise DataError(f"{where}: chat_template is {type(source).__name__}, expected Jinja text; copy the file again")
    tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    return ChatTemplate(source, tokens, str(where))


def _token_text(entry: object) -> str | None:
    """Return the text of a special token, which is written as text or as an object with its ``content``."""
    content = entry.get("content") if isinstance(entry, Mapping) else entry
    return content if isinstance(content, str) else None


def _stop_tokens(folder: Path, backend: tokenizers.Tokenizer) -> tuple[str, ...]:
    path = folder / "tokenizer_config.json"
    eos = _read_json(path).get("eos_token")
    content = _token_text(eos)
    if content is None:
        raise DataError(f"{path}: eos_token is {eos!r}, expected the text of the token that ends a response")
    generation_path = folder / "generation_config.json"
    declared = _read_json(generation_path).get("eos_token_id") if generation_path.is_file() else None
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    tokens = [content]
    for token_id in ids:
        token = backend.id_to_token(token_id) if isinstance(token_id, int) else None
        if token is None:
            raise DataError(f"{generation_path}: eos_token_id {token_id!r} is not in the vocabulary of tokenizer.json")
        tokens.append(token)
    return tuple(dict.fromkeys(tokens))


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise DataError(f"{path}: no such file; copy it from the checkpoint") from e
    except ValueError as e:
        raise DataError(f"{path}: not valid JSON ({e}); copy the file from the checkpoint again") from e
    if not isinstance(content, Mapping):
        raise DataError(f"{path}: got {type(content).__name__}, expected a JSON object; copy the file again")
    return content
