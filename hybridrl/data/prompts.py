"""Rows of a source to prompts in tokens. Every row is checked before anything starts; faults are listed together.

    row -> messages or text -> chat template -> tokens -> long prompts dropped or cut, and counted -> Prompt

Besides the columns that the configuration names, a row may have verl's ``data_source`` (name of its data set),
``extra_info`` (anything for rewards) and ``agent_name``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hybridrl.config.choices import LongPrompts
from hybridrl.config.schema import DataConfig
from hybridrl.data.chat import ROLES, Message
from hybridrl.data.sample import Prompt
from hybridrl.data.sources.rows import BadRow, Row, shown
from hybridrl.data.tokenizer import Tokenizer
from hybridrl.errors import DataError

MAX_LISTED_PROBLEMS = 20
DATA_SOURCE, EXTRA_INFO, AGENT_NAME = "data_source", "extra_info", "agent_name"
_AGENTS = ("single_turn", "single_turn_agent")


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The prompts of one source.

    Attributes:
        num_long: Rows over the limit, by what happened to them; none for LongPrompts.ERROR.
    """

    where: str
    prompts: tuple[Prompt, ...]
    num_long: Mapping[LongPrompts, int]

    def notes(self) -> list[str]:
        """Return what a person should know, one line each."""
        return [f"{self.where}: {count} long prompts: {what.value}" for what, count in self.num_long.items()]


def read_prompts(where: str, rows: Iterable[tuple[int, Row]], config: DataConfig, tokenizer: Tokenizer) -> PromptFile:
    """Check and tokenise every row of a source.

    Args:
        where: The source, as messages name it.

    Raises:
        DataError: Listing each faulty row as ``file:row: fault`` (the first 20, and how many more).
    """
    check = _RowCheck(where, config, tokenizer)
    prompts = []
    for number, row in rows:
        if isinstance(row, BadRow):
            check.report(number, row.problem)
        elif (prompt := check.prompt(number, row)) is not None:
            prompts.append(prompt)
    if check.problems:
        raise DataError(_listing(check.problems))
    if not prompts:
        dropped = check.num_long[LongPrompts.DROP]
        got = (
            f"all {dropped} prompts are over data.max_prompt_tokens {config.max_prompt_tokens}"
            if dropped
            else "no rows"
        )
        raise DataError(f"{where}: {got}; expected at least one prompt")
    return PromptFile(where, tuple(prompts), dict(check.num_long))


@dataclass(slots=True)
class _RowCheck:
    """Turns rows of one source into prompts and gathers what is wrong with them."""

    where: str
    config: DataConfig
    tokenizer: Tokenizer
    problems: list[str] = field(default_factory=list)
    num_long: Counter[LongPrompts] = field(default_factory=Counter)
    _rows_of_ids: dict[str, int] = field(default_factory=dict)

    def report(self, number: int, problem: str) -> None:
        """Note a fault of a row."""
        self.problems.append(f"{self.where}:{number}: {problem}")

    def prompt(self, number: int, row: Mapping[str, object]) -> Prompt | None:
        """Return the prompt of a row, or note its faults; None as well for a row that is dropped."""
        num_before = len(self.problems)
        text = self._text(number, row)
        answer = self._answer(number, row)
        prompt_id = self._prompt_id(number, row)
        data_source, extra_info = self._data_source(number, row), self._extra_info(number, row)
        self._check_agent(number, row)
        tokens = None if text is None else self._tokens(number, *text)
        if len(self.problems) > num_before or tokens is None:
            return None
        token_ids, read = tokens
        return Prompt(prompt_id, token_ids, read, answer, f"{self.where}:{number}", data_source, extra_info)

    def _text(self, number: int, row: Mapping[str, object]) -> tuple[str, bool] | None:
        """Return the text of a prompt, and whether it is a rendered chat; None when it is faulty."""
        key = self.config.prompt_key
        value = self._value(number, row, key, "the prompt text")
        if value is None:
            return None
        if isinstance(value, list):
            messages = self._messages(number, key, value)
            return None if messages is None else self._rendered(number, messages)
        if not isinstance(value, str):
            self.report(number, f"{key!r} is {shown(value)}, expected text or a list of chat messages")
        elif not value.strip():
            self.report(number, f"{key!r} is empty, expected a prompt; fill it in or remove the row")
        elif not _is_unicode(value):
            self.report(number, f"{key!r} holds half of a surrogate pair, expected Unicode text; correct the escape")
        elif self.config.text_as_chat:
            return self._rendered(number, [{"role": "user", "content": value}])
        else:
            return value, False
        return None

    def _messages(self, number: int, key: str, value: list[object]) -> list[Message] | None:
        messages: list[Message] = []
        for index, entry in enumerate(value):
            role, content = (entry.get("role"), entry.get("content")) if isinstance(entry, Mapping) else (None, None)
            if (
                not isinstance(role, str)
                or role not in ROLES
                or not isinstance(content, str)
                or not _is_unicode(content)
            ):
                expected = f"a role ({', '.join(ROLES)}) and content that is text"
                self.report(number, f"{key!r} message {index} is {shown(entry)}, expected {expected}")
                return None
            messages.append({"role": role, "content": content})
        if not messages or messages[-1]["role"] == "assistant" or not messages[-1]["content"].strip():
            self.report(number, f"{key!r} is a chat without a last message to answer; add one or remove the row")
            return None
        return messages

    def _rendered(self, number: int, messages: list[Message]) -> tuple[str, bool] | None:
        if self.config.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        try:
            return self.tokenizer.render_chat(messages), True
        except DataError as e:
            self.report(number, str(e))
            return None

    def _tokens(self, number: int, text: str, is_chat: bool) -> tuple[tuple[int, ...], str] | None:
        """Return the tokens of a text and what they say, after the policy for long prompts; None for none."""
        token_ids = self.tokenizer.encode(text) if is_chat else self.tokenizer.encode_prompt(text)
        limit, policy = self.config.max_prompt_tokens, self.config.long_prompts
        if len(token_ids) <= limit:
            return token_ids, text
        if policy is LongPrompts.ERROR:
            expected = f"at most {limit} (data.max_prompt_tokens)"
            next_step = "shorten it, raise the limit, or set data.long_prompts"
            self.report(number, f"prompt of {len(token_ids)} tokens, expected {expected}; {next_step}")
            return None
        self.num_long[policy] += 1
        if policy is LongPrompts.DROP:
            return None
        token_ids = token_ids[-limit:] if policy is LongPrompts.TRUNCATE_LEFT else token_ids[:limit]
        return token_ids, self.tokenizer.decode(token_ids)

    def _answer(self, number: int, row: Mapping[str, object]) -> str:
        key = self.config.answer_key
        answer = self._value(number, row, key, "the answer that the reward compares with")
        if answer is None or (isinstance(answer, str) and _is_unicode(answer)):
            return answer or ""
        is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
        if is_number and math.isfinite(answer):  # type: ignore[arg-type]
            return str(answer)
        self.report(number, f"{key!r} is {shown(answer)}, expected text or a number")
        return ""

    def _prompt_id(self, number: int, row: Mapping[str, object]) -> str:
        key = self.config.id_key
        if key is None:
            return f"{self.where.rpartition('/')[2]}:{number}"
        value = self._value(number, row, key, "a unique id")
        if value is None:
            return ""
        if not isinstance(value, str | int) or isinstance(value, bool):
            self.report(number, f"{key!r} is {shown(value)}, expected text or a whole number")
            return ""
        first = self._rows_of_ids.setdefault(str(value), number)
        if first != number:
            self.report(number, f"{key!r} is {shown(value)} as in row {first}, expected a unique id")
        return str(value)

    def _data_source(self, number: int, row: Mapping[str, object]) -> str:
        value = row.get(DATA_SOURCE)
        if value is None or (isinstance(value, str) and _is_unicode(value)):
            return value or ""
        self.report(number, f"{DATA_SOURCE!r} is {shown(value)}, expected the name of a data set")
        return ""

    def _extra_info(self, number: int, row: Mapping[str, object]) -> str:
        value = row.get(EXTRA_INFO)
        if value is None:
            return ""
        try:
            return json.dumps(value)
        except (TypeError, ValueError) as e:
            self.report(
                number, f"{EXTRA_INFO!r} cannot be written as JSON ({e}), expected text, numbers, lists and objects"
            )
            return ""

    def _check_agent(self, number: int, row: Mapping[str, object]) -> None:
        agent = row.get(AGENT_NAME)
        if agent is not None and agent not in _AGENTS:
            expected = "single_turn; other agent loops do not play prompts from files"
            self.report(number, f"{AGENT_NAME!r} is {shown(agent)}, expected {expected}")

    def _value(self, number: int, row: Mapping[str, object], key: str, meaning: str) -> object:
        value, is_there = _lookup(row, key)
        if value is None:
            got = f"{key!r} is null" if is_there else f"no key {key!r} (keys: {', '.join(map(repr, row)) or 'none'})"
            self.report(number, f"{got}, expected {meaning}")
        return value


def _lookup(row: Mapping[str, object], key: str) -> tuple[object, bool]:
    """Return the value of a column, or of field b of column a for ``a.b``, and whether there is one."""
    if key in row:
        return row[key], True
    column, _, name = key.partition(".")
    inner = row.get(column)
    return _lookup(inner, name) if name and isinstance(inner, Mapping) else (None, False)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _listing(problems: list[str]) -> str:
    shown_problems = problems[:MAX_LISTED_PROBLEMS]
    more = len(problems) - len(shown_problems)
    return "\n".join(shown_problems + ([f"... and {more} more faults"] if more else []))
