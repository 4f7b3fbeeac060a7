"""Chat templates render as transformers renders them, and what they refuse is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.data.chat import ChatTemplate
from hybridrl.data.tasks.demo_tokenizer import write_demo_tokenizer
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.errors import DataError

TEMPLATE = """{%- if tools %}never{% endif %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {{- m.role[0] + ':' + (m.content | trim) + '\n' }}
    {%- if m.role == 'system' %}{{ m | tojson }}{% continue %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'a:' }}{% endif %}
"""
CHAT = [{"role": "system", "content": "<é>"}, {"role": "user", "content": " rev "}]


def test_a_template_renders_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_demo_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.render_chat(CHAT) == expected
    assert expected.startswith("<bos>s:<é>")
    ids = reference.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(expected) == tuple(ids)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "not valid Jinja"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages (roles must alternate)"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages"),
    ],
)
def test_a_template_that_cannot_be_used_is_explained(template: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        ChatTemplate(template, {}, "tokenizer_config.json").render(CHAT)
    assert message in str(caught.value)
    assert "tokenizer_config.json" in str(caught.value)


def test_a_tokenizer_without_a_template_refuses_chats(tmp_path: Path) -> None:
    write_demo_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"tokenizer.json: has no chat template, expected chat_template.jinja"):
        load_tokenizer(tmp_path).render_chat(CHAT)
