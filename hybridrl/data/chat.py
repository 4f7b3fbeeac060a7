"""Chat messages to the text that a model was trained to read, by the chat template of its own tokenizer.

A template is a Jinja program from a checkpoint; it runs in Jinja's sandbox. What it is given follows the convention of
Hugging Face: ``messages``, ``add_generation_prompt``, the special tokens, ``raise_exception`` and ``tojson``. The date is left
out (``strftime_now``), because a prompt must be the same when a run resumes; templates have a fixed date for that case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hybridrl.errors import DataError

Message = Mapping[str, str]
ROLES = ("system", "user", "assistant", "tool")


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: The Jinja text.
        special_tokens: ``bos_token`` and the like, by name.
        where: The file that it comes from.

    Raises:
        DataError: When the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self._special_tokens = dict(special_tokens)
        self._where = where
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise DataError(f"{where}: the chat template is not valid Jinja ({e}); copy it from the checkpoint") from e

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat, up to where the policy is to go on.

        Raises:
            DataError: When the template refuses the messages.
        """
        try:
            return str(
                self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._special_tokens)
            )
        except (jinja2.TemplateError, TypeError) as e:
            raise DataError(f"the chat template of {self._where} refuses these messages ({e}); correct them") from e


def _to_json(value: object, *, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """Return JSON without Jinja's escaping of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
