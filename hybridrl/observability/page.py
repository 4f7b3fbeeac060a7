"""Self-contained pages: a head and a template beside this file with style, script and data put in. They load nothing from anywhere.

The data is one JSON object in a script element of its own. No text in it can end that element, because every ``<`` is written as an
escape; and the page's script puts text into the document as text, never as markup. A content security policy in the head forbids
the page every request.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path

from hybridrl.observability.files import replaced

_DATA_MARK = "/*data*/"


def write_page(path: Path, template: str, data: object) -> None:
    """Replace `path` by a page.

    Args:
        template: Name of a file beside this one, which goes on from the title in the head.
        data: JSON values; no NaN and no infinity.
    """
    head, tail = _filled(template)
    with replaced(path) as temporary, temporary.open("wb") as file:
        file.writelines((head, embedded_json(data), tail))


def embedded_json(data: object) -> bytes:
    """Return JSON that can stand inside a script element, whatever text it carries."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c").encode()


@cache
def _filled(template: str) -> tuple[bytes, bytes]:
    """Return a page before and after its data."""
    head, tail = (_read("page_head.html") + _read(template)).split(_DATA_MARK)
    head = head.replace("/*style*/", _read("page.css"))
    tail = tail.replace("/*script*/", _read("page.js"))
    if "/*plotly*/" in tail:
        from plotly.offline import get_plotlyjs

        tail = tail.replace("/*plotly*/", get_plotlyjs())
    return head.encode(), tail.encode()


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
