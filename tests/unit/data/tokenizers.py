"""The demo tokenizer, loaded once."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from hybridrl.data.tasks.demo_tokenizer import write_demo_tokenizer
from hybridrl.data.tokenizer import FastTokenizer, load_tokenizer


@functools.cache
def demo_tokenizer() -> FastTokenizer:
    """Return the demo tokenizer as it is read from its files."""
    with tempfile.TemporaryDirectory() as folder:
        write_demo_tokenizer(Path(folder))
        return load_tokenizer(Path(folder))
