"""Builds the site of the documentation, strictly: `make docs`.

    .venv/bin/python -m tests.docs.site

Pages lie in several folders of the repository and link to its files.  They are laid into one folder as they lie there,
with what they link to, so that the same links work on the site.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.docs.links import REPOSITORY, links, pages

SETTINGS: Final = REPOSITORY / "docs/mkdocs.yml"
STAGE: Final = REPOSITORY / "build/pages"
SITE: Final = REPOSITORY / "build/site"
_LOADED: Final = re.compile(
    r"""<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*(?:src|href)="(?:https?:)?//[^"]*"""
)
_CODE: Final = re.compile(r"`[^`\n]*`")


def stage(folder: Path) -> None:
    """Lay out the pages and the files that they link to."""
    shutil.rmtree(folder, ignore_errors=True)
    sources = pages()
    linked = {link.target for page in sources for link in links(page) if link.target.is_file()}
    for source in {*sources, *linked}:
        target = folder / source.relative_to(REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source in sources:
            target.write_text(for_site(source.read_text()))
        else:
            shutil.copyfile(source, target)


def for_site(text: str) -> str:
    """A page in Python-Markdown's form: code in a table's cell holds `|` as it is, which GitHub wants escaped."""
    lines = text.split("\n")
    return "\n".join(
        _CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line for line in lines
    )


def loaded_from_elsewhere(site: Path) -> list[str]:
    """What a reader's browser would fetch from another host."""
    return sorted({found for page in site.rglob("*.html") for found in _LOADED.findall(page.read_text())})


def main() -> int:
    stage(STAGE)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(SETTINGS)]
    status = subprocess.run(command).returncode
    elsewhere = loaded_from_elsewhere(SITE) if status == 0 else []
    for one in elsewhere:
        print(f"docs: a page loads from another host: {one}", file=sys.stderr)
    if status == 0 and not elsewhere:
        print(f"{SITE.relative_to(REPOSITORY)}/index.html")
    return 1 if status or elsewhere else 0


if __name__ == "__main__":
    sys.exit(main())
