"""The report's page: complete, self-contained, and never more than text of what a recording holds."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.facts.fact_columns import Pairs, Sizes
from railscope.agent.analysis.facts.report import Composition, Latency, Report, Traffic, Unknown
from railscope.agent.analysis.report.html import html_text, write_html
from railscope.agent.analysis.report.measurements import MEASUREMENTS
from railscope.agent.analysis.report.report import ONLY_AN_ORDER
from railscope.agent.analysis.report.words import summarise
from railscope.agent.analysis.timing.overlap import NETWORK_ONLY
from railscope.agent.config.file import ConfigError
from tests.unit.model_shapes import GPT_3B
from tests.unit.reports import observed, report_of_shape, with_names

REPORT = report_of_shape(GPT_3B)
EMPTY = Report(
    folders=("/recordings/nothing",),
    simulated=False,
    began_seconds=0.0,
    seconds=0.0,
    gpus=(),
    ops=(),
    sizes=Sizes.from_uses(()),
    communicators=(),
    matrix=Traffic(0, Pairs.from_pairs(()), None, 0, 0, 0, None, None, (), ""),
    latency=Latency((), (), 0),
    composition=Composition((), None),
    regularity=None,
    iterations=(),
    bandwidth=(),
    unknown=(Unknown(1, "No call was recorded: record while the job communicates."),),
)
_VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """Reads a page as a browser would, and checks that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    @property
    def shape(self) -> list[tuple[str, str | None]]:
        return [(tag, attributes.get("class")) for tag, attributes in self.tags]


TAME = Page(html_text(with_names(REPORT, "xy"))).shape


def test_every_measurement_is_there_with_its_definition_row_and_paper() -> None:
    text = Page(html_text(REPORT)).text
    for one in MEASUREMENTS:
        assert f"{one.name}: {one.definition} (row {one.number} of the papers' table; {', '.join(one.papers)})" in text


def test_the_top_says_what_the_job_is_in_words() -> None:
    sentences = summarise(REPORT)
    assert sentences[0] == "The job is bound by computation or input: no operation is under way for 77 % of a step."
    assert sentences[1].startswith("32 GPUs on 4 servers were recorded for 44 min")
    assert "The job is pipeline 4 × tensor 2 × data 4: every communicator is a line of the grid of ranks." in sentences
    assert "128 of 992 directed pairs of GPUs talk (12.9 %), and 16 of them carry half of the bytes." in sentences
    assert any(sentence.startswith("Communication takes 23") for sentence in sentences)
    text = Page(html_text(REPORT)).text
    assert all(" ".join(sentence.split()) in text for sentence in sentences)


def test_where_what_stays_in_a_server_has_no_times_the_rest_of_a_step_may_be_communication() -> None:
    first, *_ = summarise(replace(REPORT, unknown=(*REPORT.unknown, Unknown(11, NETWORK_ONLY))))
    assert first == "What bounds the job cannot be told: completions are not seen of all its communicators."


def test_a_shape_that_is_not_certain_is_not_told_as_fact() -> None:
    shape = REPORT.composition.parallelism
    assert shape is not None
    unsure = replace(REPORT, composition=replace(REPORT.composition, parallelism=replace(shape, certain=False)))
    assert any(sentence.startswith("The job is perhaps pipeline 4") for sentence in summarise(unsure))


def test_it_has_a_picture_of_each_kind_and_tables() -> None:
    page = Page(html_text(REPORT))
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 10
    assert len([tag for tag, _ in page.tags if tag == "table"]) >= 12


def test_what_is_not_known_and_what_was_lost_is_said() -> None:
    text = Page(html_text(REPORT)).text
    assert "Not known: Spine traffic needs the leaf switch of each server: give --leaf-map FILE." in text
    assert "12 calls were observed and not recorded" in text


def test_a_page_without_times_shows_no_span_and_no_moment() -> None:
    untimed = tuple(Unknown(row, ONLY_AN_ORDER) for row in (9, 10, 11, 12, 16))
    text = html_text(replace(REPORT, unknown=untimed))
    page = Page(text)
    assert "<title>railscope: Communication of 32 GPUs</title>" in text
    assert "/recordings/gpt-3b · times are not known" in page.text
    assert "2026-09-21" not in page.text.split("Operations")[0]
    assert page.text.count(ONLY_AN_ORDER) == 3  # in the parts on iterations, all-to-all and receives, once each
    assert f"Not known (regularity, communication ratio, non-overlapped ratio): {ONLY_AN_ORDER}" in page.text


def test_simulated_data_is_labelled_and_other_is_not() -> None:
    badge = ("span", "badge")
    assert badge in Page(html_text(REPORT)).shape
    assert badge not in Page(html_text(replace(REPORT, simulated=False))).shape


def test_the_page_needs_nothing_but_itself() -> None:
    text = html_text(REPORT)
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "image", "use", "base"}
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "xlink:href")]
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"url\(|@import|https?://", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_links_lead_to_sections_that_are_there() -> None:
    page = Page(html_text(REPORT))
    targets = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    links = [str(attributes["href"]).removeprefix("#") for tag, attributes in page.tags if tag == "a"]
    assert links
    assert set(links) <= targets


@settings(max_examples=12, deadline=None)
@given(st.text(min_size=1, max_size=60))
def test_whatever_a_recording_names_changes_no_element(name: str) -> None:
    # A letter of its own keeps names that are only blanks from being equal to none.
    assert Page(html_text(with_names(REPORT, f"x{name}"))).shape == TAME


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</title></style></svg><script>",
        "]]>--><b>",
        "&lt;b&gt;&amp;",
    ],
)
def test_markup_in_a_name_is_shown_as_it_is(name: str) -> None:
    page = Page(html_text(with_names(REPORT, name)))
    assert not [tag for tag, _ in page.tags if tag in ("script", "img")]
    assert name in page.text


def test_characters_that_html_cannot_hold_are_replaced() -> None:
    text = html_text(with_names(REPORT, "a\x00b\x1b[31m\ud800c"))
    assert "a\ufffdb\ufffd[31m\ufffdc" in text
    text.encode("utf-8")


def test_a_recording_of_nothing_says_so_in_every_part() -> None:
    page = Page(html_text(EMPTY))
    assert "No call was recorded: record while the job communicates." in page.text
    parts = len([tag for tag, _ in page.tags if tag == "h2"])
    assert page.text.count("No data for this was recorded.") == parts - 1
    assert not [tag for tag, _ in page.tags if tag in ("svg", "table")]


def test_a_thousand_gpus_make_a_page_of_a_bearable_size() -> None:
    shape = replace(GPT_3B, pipeline=8, tensor=8, data=16, layers=56)
    big = replace(report_of_shape(shape), matrix=observed(shape))
    text = html_text(big)
    assert len(text) < 3_000_000
    assert "each square is 4 × 4 of 1,024 GPUs, their bytes added up" in text


def test_the_file_is_written_and_a_folder_that_is_missing_is_one_line(tmp_path: Path) -> None:
    write_html(REPORT, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == html_text(REPORT)
    with pytest.raises(ConfigError, match=r"missing/report\.html: cannot write the page: No such file"):
        write_html(REPORT, tmp_path / "missing/report.html")


def test_the_same_report_makes_the_same_page() -> None:
    assert html_text(REPORT) == html_text(report_of_shape(GPT_3B))


def test_a_table_that_is_cut_says_how_many_rows_are_missing() -> None:
    text = Page(html_text(REPORT)).text
    assert "… and 116 more: 'railscope report --json' has all." in text
    assert text.count("more: 'railscope report --json' has all.") == 4
