"""Commands of the pages are commands: every line that readers copy is understood by the parser, options and all."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.agent.cli.main import make_parser
from tests.docs.links import REPOSITORY, pages

BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"^(?:\S*/)?railscope$")


def commands(page: Path) -> Iterator[list[str]]:
    """The words behind `railscope` of each command of a page; what a pipe or `&&` leads to is a command of its own."""
    for block in BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words: list[str] = []
            for word in [*shlex.split(line, comments=True), "|"]:
                if word not in ("|", "&&", ">", "&"):
                    words.append(word)
                    continue
                if words and PROGRAM.match(words[0]):
                    yield words[1:]
                words = []


FOUND = [(page.relative_to(REPOSITORY).as_posix(), words) for page in pages() for words in commands(page)]


@pytest.mark.parametrize(("page", "words"), FOUND, ids=[f"{page}: {' '.join(words)}" for page, words in FOUND])
def test_a_command_of_a_page_is_understood(page: str, words: list[str]) -> None:
    del page
    parsed, unknown = make_parser().parse_known_args(words)
    assert unknown == []
    assert callable(parsed.run)


def test_the_pages_have_commands() -> None:
    assert len(FOUND) > 35
    assert any(page == "docs/tutorial.md" and "--keep" in words for page, words in FOUND)
