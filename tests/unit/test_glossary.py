"""The glossary defines every term once, names what the code names, and is linked from where readers begin."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, get_args

import pytest

from railscope.agent.facts.rail_ledger import Origin
from railscope.agent.facts.stall import Strength
from tests.nccl.library import REPOSITORY

GLOSSARY: Final = (REPOSITORY / "docs/glossary.md").read_text()
_TERM: Final = re.compile(r"^(?:\| )?((?:\*\*[^*]+\*\*(?:, )?)+)", re.MULTILINE)


def terms() -> list[str]:
    return [term for line in _TERM.findall(GLOSSARY) for term in re.findall(r"\*\*([^*]+)\*\*", line)]


def section(title: str) -> str:
    return GLOSSARY.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_term_is_defined_once() -> None:
    assert len(terms()) > 30
    assert sorted(terms()) == sorted(set(terms()))


def test_origins_are_those_of_the_ledger() -> None:
    origins = [origin.value for origin in Origin]
    assert sorted(re.findall(r"^\| \*\*(\w+)", section("Origin of port bytes"), re.MULTILINE)) == sorted(origins)


def test_strengths_are_those_of_stalls() -> None:
    line = next(line for line in GLOSSARY.splitlines() if line.startswith("| **strength**"))
    assert sorted(re.findall(r"`(\w+)`:", line)) == sorted(get_args(Strength))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_it_is_linked_where_readers_begin(page: str) -> None:
    assert "(docs/glossary.md)" in (REPOSITORY / page).read_text()


def anchors(text: str) -> Sequence[str]:
    return [title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.MULTILINE)]


def test_links_into_it_lead_to_a_section() -> None:
    pages = [path.read_text() for path in (REPOSITORY / "docs").rglob("*.md")]
    linked = [anchor for page in pages for anchor in re.findall(r"glossary\.md#([\w-]+)", page)]
    assert len(linked) >= 3
    assert set(linked) <= set(anchors(GLOSSARY))
