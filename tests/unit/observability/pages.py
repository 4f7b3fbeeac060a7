"""The data of a written page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def page_data(path: Path) -> Any:
    """Return what the page carries, read as a browser would find it."""
    page = path.read_text(encoding="utf-8")
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    return json.loads(data[1])


def own_text(path: Path) -> str:
    """Return the page without the Plotly library."""
    page = path.read_text(encoding="utf-8")
    plotly = re.search(r"<script>(/\*\*\s*\* plotly.*?)</script>", page, re.DOTALL)
    return page if plotly is None else page.replace(plotly[1], "")


ASKS_FOR_SOMETHING = re.compile(r"https?:|//cdn|<link|@import|\bsrc=|url\(|fetch\(|import\(")
