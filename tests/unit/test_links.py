"""Links between pages lead to files and headings that are there; every page is on the site."""

from __future__ import annotations

from tests.docs import architecture
from tests.docs.links import REPOSITORY, anchors, links, pages


def test_every_link_leads_somewhere() -> None:
    found = [(page, link) for page in pages() for link in links(page)]
    assert len(found) > 100
    assert [
        f"{page.relative_to(REPOSITORY)}: {link.text} {link.problem()}" for page, link in found if link.problem()
    ] == []


def test_the_picture_of_the_architecture_is_what_its_source_draws() -> None:
    assert architecture.FILE.read_text() == architecture.draw(), "run .venv/bin/python -m tests.docs.architecture"


def test_every_page_of_the_documents_is_on_the_site() -> None:
    named = (REPOSITORY / "docs/mkdocs.yml").read_text()
    assert [
        str(page)
        for page in pages()
        if page.is_relative_to(REPOSITORY / "docs") and str(page.relative_to(REPOSITORY)) not in named
    ] == []


def test_headings_become_anchors_as_on_github() -> None:
    assert anchors("# What it costs\n\n## `/stalls`, and more\n\n### rail_down\n\n```\n# no heading\n```\n") == {
        "what-it-costs",
        "stalls-and-more",
        "rail_down",
    }


def test_the_front_page_is_one_page() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 150
