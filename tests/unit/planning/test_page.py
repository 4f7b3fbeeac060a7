"""docs/planning.md has the tables of the recipes as they are planned now."""

from __future__ import annotations

import importlib.util

from tests.unit.planning.recipes import CONFIGS, RECIPES, planned


def test_the_tables_of_the_recipes_are_those_of_their_plans():
    root = CONFIGS.parent
    found = importlib.util.spec_from_file_location("tables", root / "scripts" / "make_planning_tables.py")
    tables = importlib.util.module_from_spec(found)
    found.loader.exec_module(tables)
    page = (root / "docs" / "planning.md").read_text(encoding="utf-8")
    assert tables.with_recipes(page, [planned(name) for name in RECIPES]) == page
