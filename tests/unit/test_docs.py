"""Links between the pages lead somewhere, and every page is reached from the README."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[tuple[Path, str]]:
    """Return the files that a page links to, each with the heading in it or an empty text."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    return [((page.parent / path).resolve() if path else page, anchor) for path, anchor in _LINK.findall(text)]


def anchors(page: Path) -> set[str]:
    """Return the headings of a page as links name them: small letters, no punctuation, hyphens for spaces."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_link_between_pages_leads_to_a_file_and_a_heading() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target} {anchor}"
        for page in PAGES
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert not broken, "\n".join(broken)


def test_the_readme_names_every_page() -> None:
    named = {target for target, _ in links(README)}
    assert [page.name for page in PAGES[1:] if page not in named] == []
    assert len(PAGES) > 15
