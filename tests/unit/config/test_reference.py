"""The page of configuration keys says what the schema says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hybridrl.config.keys import experiment_schema

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "configuration.md"


def test_the_committed_page_is_what_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "make_config_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = PAGE.read_text(encoding="utf-8")
    assert module.with_reference(page) == page, "run python scripts/make_config_reference.py"


def test_every_key_has_a_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in experiment_schema().keys if f"| `{name}` |" not in page] == []
