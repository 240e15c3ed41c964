"""A report as one page of HTML: words on top, then every measurement with its definition, picture and table.

The page is one file that needs no other and no script; it follows the reader's light or dark theme, and prints.
Bytes are shown in KiB, MiB, …; `railscope report --json` has the exact numbers, and the rows that tables leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.agent.analysis.facts.quantities import (
    UNKNOWN,
    format_bytes,
    format_seconds,
    format_share,
    format_time,
)
from railscope.agent.analysis.facts.report import Report
from railscope.agent.analysis.pictures.heat import heat_map_of
from railscope.agent.analysis.pictures.parts import Picture
from railscope.agent.analysis.pictures.svg import svg_element
from railscope.agent.analysis.report import html_tables as tables
from railscope.agent.analysis.report.html_page import Element, page, tag
from railscope.agent.analysis.report.measurements import BY_NUMBER
from railscope.agent.analysis.report.picture_files import PICTURES
from railscope.agent.analysis.report.report import has_times
from railscope.agent.analysis.report.words import summarise, unknown_by_reason
from railscope.agent.config.file import ConfigError
from railscope.agent.facts.counted import format_count


@dataclass(frozen=True, slots=True)
class _Section:
    """Measurements that are shown together."""

    rows: tuple[int, ...]
    title: str
    content: Callable[[Report], list[Element]]


def write_html(report: Report, path: Path) -> None:
    """Write the report as a page.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(html_text(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the page: {error.strerror}") from None


def html_text(report: Report) -> str:
    """The report's page as text."""
    title = (
        "Communication of "
        f"{format_count(len(report.gpus), 'GPU')}{f', {format_seconds(report.seconds)}' if has_times(report) else ''}"
    )
    body = [*_head(report, title), *_contents(), *_losses(report)]
    for section in _SECTIONS:
        body += _section(report, section)
    return page(f"railscope: {title}", [*body, _foot(report)])


def _head(report: Report, title: str) -> Iterator[Element]:
    yield tag("h1", title)
    when = format_time(report.began_seconds) if has_times(report) else "times are not known"
    yield tag("p", f"{', '.join(report.folders)} · {when}", css="meta")
    if report.one_of_several:
        yield tag("p", report.one_of_several, css="note")
    if report.simulated:
        yield tag(
            "p",
            tag("span", "simulated", css="badge"),
            " The recording is not from real hardware: a testbed or a recorded tree produced it.",
        )
    yield tag("section", tag("ul", *(tag("li", sentence) for sentence in summarise(report))), css="summary")


def _contents() -> Iterator[Element]:
    yield tag(
        "nav",
        *(tag("a", section.title, href=f"#m{section.rows[0]}") for section in _SECTIONS),
        **{"aria-label": "parts"},
    )


def _losses(report: Report) -> Iterator[Element]:
    if report.losses:
        yield tag("div", tag("b", "Lost or uncertain"), *(tag("p", loss) for loss in report.losses), css="note")


def _section(report: Report, section: _Section) -> Iterator[Element]:
    yield tag("h2", section.title, id=f"m{section.rows[0]}")
    for row in section.rows:
        told = BY_NUMBER[row]
        sources = f" (row {row} of the papers' table; {', '.join(told.papers)})"
        yield tag("p", tag("b", f"{told.name}: "), f"{told.definition}{sources}", css="definition")
    content = section.content(report)
    yield from content
    reasons = unknown_by_reason(unknown for unknown in report.unknown if unknown.row in section.rows)
    for reason, names in reasons:
        what = f"Not known ({', '.join(names)}): " if len(section.rows) > 1 else "Not known: "
        yield tag("p", tag("b", what), reason, css="note")
    if not content and not reasons:
        yield tag("p", "No data for this was recorded.", css="note")


def _figure(report: Report, name: str, words: str = "") -> list[Element]:
    picture: Picture | None = PICTURES[name](report)
    if picture is None:
        return []
    caption = [tag("figcaption", words)] if words else []
    return [tag("figure", svg_element(picture), *caption)]


def _operations(report: Report) -> list[Element]:
    return tables.operations(report)


def _sizes(report: Report) -> list[Element]:
    words = "A line rises at each size by the part of the operation's calls that have it."
    return [*_figure(report, "sizes", words), *tables.sizes(report)]


def _pairs(report: Report) -> list[Element]:
    traffic = report.matrix
    if not traffic.pairs:
        return []
    heat = heat_map_of(traffic, [gpu.server for gpu in report.gpus], numbers=[gpu.number for gpu in report.gpus])
    words = (
        "Colours go by the logarithm of bytes; a pair without colour sent nothing. "
        f"{traffic.basis}{f' Binned: {heat.note}.' if heat.note else ''}"
    )
    possible = traffic.gpus * (traffic.gpus - 1)
    told = (
        f"Directed pairs that talk: {len(traffic.pairs):,} of {possible:,}, {format_share(traffic.sparsity)} of the "
        "matrix."
    )
    return [
        *_figure(report, "pairs", words),
        tag("p", told),
        *tables.pairs(report),
    ]


def _edges(report: Report) -> list[Element]:
    rails = [*tables.rails(report), *tables.owners(report)]
    if report.shared_rails:
        rails.append(tag("p", report.shared_rails, css="note"))
    rails += tables.transfers(report)
    if not report.matrix.pairs:
        return rails
    return [*_figure(report, "servers"), *tables.edges(report), *rails]


def _latency(report: Report) -> list[Element]:
    return [*_figure(report, "latency"), *tables.latency(report), *tables.anomalies(report)]


def _composition(report: Report) -> list[Element]:
    shape = report.composition.parallelism
    told = []
    if shape is not None:
        sure = "" if shape.certain else "perhaps "
        expert = f" × expert {shape.expert}" if shape.expert > 1 else ""
        words = f"pipeline {shape.pipeline} × tensor {shape.tensor} × data {shape.data}{expert}: {shape.reason}"
        told = [tag("p", tag("b", "Shape: "), f"{sure}{words}")]
    return [*told, *_figure(report, "composition"), *tables.composition(report)]


def _iterations(report: Report) -> list[Element]:
    return [
        *_figure(report, "iterations"),
        *tables.iterations(report),
        *_figure(report, "parallelism-time"),
        *tables.role_times(report),
    ]


def _all_to_all(report: Report) -> list[Element]:
    return [*_figure(report, "all-to-all"), *_figure(report, "all-to-all-bytes"), *tables.all_to_all(report)]


def _bandwidth(report: Report) -> list[Element]:
    return [*_figure(report, "bandwidth"), *tables.bandwidth(report)]


def _scaling(report: Report) -> list[Element]:
    return tables.scaling(report)


def _receives(report: Report) -> list[Element]:
    return [*_figure(report, "receives"), *tables.receives(report)]


def _elsewhere(_: Report) -> list[Element]:
    return []


_SECTIONS: Final[Sequence[_Section]] = (
    _Section((1,), "Operations", _operations),
    _Section((2,), "Sizes", _sizes),
    _Section((3, 4), "Traffic between GPUs", _pairs),
    _Section((5,), "Between servers, rails and leaves", _edges),
    _Section((6,), "Latency", _latency),
    _Section((7,), "Traffic by parallelism", _composition),
    _Section((9, 11, 12), "Iterations, and their communication", _iterations),
    _Section((10,), "Unequal all-to-all", _all_to_all),
    _Section((13,), "Bandwidth", _bandwidth),
    _Section((14,), "Scaling", _scaling),
    _Section((16,), "Receives", _receives),
    _Section((8, 15, 17), "Against a prediction or another run", _elsewhere),
)


def _foot(report: Report) -> Element:
    order = "as in the report of all jobs" if report.one_of_several else "from 0 in the order of ranks"
    words = (
        "Payload is what a call hands to NCCL: count × size of the data type. Wire bytes are what its algorithm then "
        f"puts on the way. Sizes are binary (1 MiB = 1,048,576 B), rates decimal; {UNKNOWN} is not known. GPUs are "
        f"numbered {order}. For example {format_bytes(131_072_000)} is 131,072,000 B."
    )
    return tag("p", words, css="meta")
