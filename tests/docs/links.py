"""The repository's pages of Markdown and where their links lead.

Source of how a heading becomes an anchor: GitHub's, which drops punctuation and joins words with hyphens; the site's
(pymdownx.slugs) does the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = ("docs", "deploy", "dashboards")
_LINK: Final = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE: Final = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_HEADING: Final = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Link:
    """A link from a page to a file of the repository."""

    page: Path
    text: str
    """As it is written."""

    @property
    def target(self) -> Path:
        path = self.text.partition("#")[0]
        return (self.page.parent / path).resolve() if path else self.page

    @property
    def anchor(self) -> str:
        return self.text.partition("#")[2]

    def problem(self) -> str:
        """What is wrong with it; empty: nothing."""
        if not self.target.is_relative_to(REPOSITORY):
            return "leads out of the repository"
        if not self.target.is_file():
            return "leads to no file"
        if self.anchor and self.anchor not in anchors(self.target.read_text()):
            return "leads to no heading of that page"
        return ""


def pages() -> list[Path]:
    """All pages that readers get."""
    found = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.md")]
    return sorted([*REPOSITORY.glob("*.md"), *found])


def links(page: Path) -> Iterator[Link]:
    """A page's links to files of the repository, pictures among them."""
    for text in _LINK.findall(_CODE.sub("", page.read_text())):
        if not re.match(r"[a-z]+:", text):
            yield Link(page, text)


def anchors(text: str) -> set[str]:
    """What a link to this page may have behind `#`."""
    found: set[str] = set()
    for heading in _HEADING.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return found
