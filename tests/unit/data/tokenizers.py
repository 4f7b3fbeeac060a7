"""The demo tokenizer, loaded once."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from hybridrl.data.tasks.demo_tokenizer import write_demo_tokenizer
from hybridrl.data.tokenizer import FastTokenizer, load_tokenizer

CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role[0] + ':' + m.content }}{% endfor %}="


@functools.cache
def demo_tokenizer(*, has_chat: bool = False) -> FastTokenizer:
    """Return the demo tokenizer as it is read from its files; with a chat template when asked for."""
    with tempfile.TemporaryDirectory() as folder:
        write_demo_tokenizer(Path(folder))
        if has_chat:
            (Path(folder) / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        return load_tokenizer(Path(folder))
