"""What was measured of simulated fleets, as tables: what rules cost and how that grows, pages, verdicts, bounds.

A figure beyond its bound is MISSED.  Where scrapes were late nothing is said of pages: the machine was too busy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from tests.fleet.costs import Costs
from tests.fleet.pages import Paged

MOST_GROUP_SECONDS: Final = 5.0
MOST_EXPONENT: Final = 1.1
MOST_PAGES: Final = 3
MOST_PAGE_BYTES: Final = 4_000
MOST_DIAGNOSE_SECONDS: Final = {512: 3.0, 1_250: 10.0}
"""By number of nodes, up to which it is asked for."""
_DEAREST_RULES: Final = 8
_LEAST_CPU_SECONDS: Final = 0.004
"""Of a rule's evaluation in a small fleet, below which its growth is the clock's noise."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure, and whether it is within its bound."""

    what: str
    figure: str
    bound: str
    met: bool | None
    """None: it cannot be told."""

    @property
    def verdict(self) -> str:
        return "not measured" if self.met is None else "MET" if self.met else "MISSED"


def rows(costs: Sequence[Costs], paged: Sequence[Paged]) -> list[Row]:
    """Every figure that has a bound."""
    found = [
        *(row for one in costs for row in _rows_of_costs(one)),
        *(row for one in paged for row in _rows_of_pages(one)),
    ]
    for fault, of in _by_fault(costs):
        if len(of) > 1:
            overall = exponent(of[0], of[-1], lambda one: one.rules_cpu_seconds)
            what = f"{of[0].nodes} to {of[-1].nodes} nodes, {fault}: exponent of all rules"
            found.append(Row(what, f"{overall:.2f}", f"≤ {MOST_EXPONENT:g}", round(overall, 2) <= MOST_EXPONENT))
    return found


def _rows_of_costs(one: Costs) -> Iterator[Row]:
    name = f"{one.nodes} nodes, {one.fault}"
    group, seconds = one.dearest_group
    met = seconds < MOST_GROUP_SECONDS
    yield Row(f"{name}: dearest group, CPU s", f"{seconds:.2f} ({group})", f"< {MOST_GROUP_SECONDS:g}", met)
    named = f"{len(one.diagnosis.findings)} of {len(one.blamed)}, {'right' if one.right else 'WRONG'}"
    yield Row(f"{name}: causes found", named, "all, nobody else", one.right)
    took = one.diagnosis.at_most_seconds
    most = next((most for nodes, most in sorted(MOST_DIAGNOSE_SECONDS.items()) if one.nodes <= nodes), math.inf)
    yield Row(f"{name}: diagnose, s", f"{took:.2f}", f"≤ {most:g}", took <= most)


def _rows_of_pages(one: Paged) -> Iterator[Row]:
    name, late = f"{one.nodes} nodes, {one.fault}", one.late_scrapes > 0
    pages = len(one.pages)
    # A job that stands still is its owner's page, a rail that is down its host's: both are there of one such fault.
    most = max(MOST_PAGES, len(one.blamed) + sum(culprit.pid is None for culprit in one.blamed))
    paged = 0 < pages <= most if one.blamed else pages == 0
    bound = f"1 to {most}" if one.blamed else "0"
    yield Row(f"{name}: pages", str(pages), bound, None if late else paged)
    if pages:
        largest, linked = max(page.size_bytes for page in one.pages), all(page.linked for page in one.pages)
        figure = f"{largest:,} bytes, {'each' if linked else 'NOT each'} with a link"
        small = linked and largest < MOST_PAGE_BYTES
        yield Row(f"{name}: largest page", figure, f"< {MOST_PAGE_BYTES:,}", None if late else small)
    alone = None if late else not one.innocents
    yield Row(f"{name}: innocent ranks called behind", str(one.innocents), "0", alone)


def describe(costs: Sequence[Costs], paged: Sequence[Paged]) -> str:
    """All tables, in Markdown."""
    parts = [_costs(costs), _exponents(costs), _dearest(costs), _pages(paged)]
    all_rows = rows(costs, paged)
    missed = [row for row in all_rows if row.met is not True]
    parts.append(f"{len(all_rows) - len(missed)} of {len(all_rows)} figures are within their bounds.")
    if missed:
        cells = [(row.what, row.figure, row.bound, row.verdict) for row in missed]
        parts.append(_markdown([("Figure", "Measured", "Bound", ""), *cells]))
    return "\n\n".join(part for part in parts if part)


def _costs(costs: Sequence[Costs]) -> str:
    if not costs:
        return ""
    cells = [
        (
            *("Nodes", "Series", "Fault", "All rules, CPU s", "Dearest group, CPU s"),
            *("Causes found", "`diagnose`, CPU s (s)", "What it says first"),
        )
    ]
    for one in costs:
        group, seconds = one.dearest_group
        cells.append(
            (
                f"{one.nodes:,}",
                f"{one.series:,}",
                one.fault,
                f"{one.rules_cpu_seconds:.2f}",
                f"{seconds:.2f}, {group.removeprefix('railscope-')}",
                f"{len(one.diagnosis.findings)} of {len(one.blamed)}{'' if one.right else ', WRONG'}",
                f"{one.diagnosis.cpu_seconds:.1f} ({one.diagnosis.seconds:.1f})",
                one.diagnosis.headline.partition(";")[0],
            )
        )
    return _markdown(cells)


def _exponents(costs: Sequence[Costs]) -> str:
    sizes = sorted({one.nodes for one in costs})
    if len(sizes) < 2:
        return ""
    steps = [*pairwise(sizes), *([(sizes[0], sizes[-1])] if len(sizes) > 2 else [])]
    figures: tuple[tuple[str, Callable[[Costs], float]], ...] = (
        ("all rules", lambda one: one.rules_cpu_seconds),
        ("dearest group", lambda one: one.dearest_group[1]),
        ("`diagnose`", lambda one: one.diagnosis.cpu_seconds),
    )
    cells = [("Exponent of", "Fault", *(f"{least} to {most}" for least, most in steps))]
    for what, figure in figures:
        for fault, of in _by_fault(costs):
            by_nodes = {one.nodes: one for one in of}
            known = (
                f"{exponent(by_nodes[least], by_nodes[most], figure):.2f}"
                if least in by_nodes and most in by_nodes
                else ""
                for least, most in steps
            )
            cells.append((what, fault, *known))
    return _markdown(cells)


def _dearest(costs: Sequence[Costs]) -> str:
    """The rules that cost most in the largest fleet, and how each grew from the smallest in which it can be told."""
    cells = [("Rule", "Fault", "CPU s", "Series", "Exponent")]
    for fault, of in _by_fault(costs):
        largest = of[-1]
        for rule in sorted(largest.rules, key=lambda one: -one.cpu_seconds)[:_DEAREST_RULES]:
            smaller = [
                (one.nodes, other.cpu_seconds)
                for one in of[:-1]
                for other in one.rules
                if (other.group, other.name) == (rule.group, rule.name) and other.cpu_seconds > _LEAST_CPU_SECONDS
            ]
            grew = ""
            if smaller:
                nodes, seconds = smaller[0]
                grew = f"{math.log(rule.cpu_seconds / seconds) / math.log(largest.nodes / nodes):.2f} from {nodes}"
            cells.append((f"`{rule.name}`", fault, f"{rule.cpu_seconds:.3f}", f"{rule.series:,}", grew))
    return _markdown(cells) if costs else ""


def _pages(paged: Sequence[Paged]) -> str:
    if not paged:
        return ""
    cells = [
        (
            *("Nodes", "Fault", "Pages", "Largest, bytes", "Alerts", "Innocent ranks", "Prometheus, cores", "GiB"),
            *("Evaluations missed", "Late scrapes"),
        )
    ]
    for one in paged:
        names = sorted({name.removeprefix("Railscope") for page in one.pages for name in page.alerts})
        cells.append(
            (
                *(f"{one.nodes:,}", one.fault, str(len(one.pages))),
                f"{max((page.size_bytes for page in one.pages), default=0):,}" if one.pages else "",
                ", ".join(names),
                *(str(one.innocents), f"{one.cores:.2f}", f"{one.resident_bytes / 2**30:.1f}"),
                *(str(one.missed_evaluations), str(one.late_scrapes)),
            )
        )
    return _markdown(cells)


def exponent(smaller: Costs, larger: Costs, figure: Callable[[Costs], float]) -> float:
    """With which power of the number of nodes a figure grows."""
    return math.log(figure(larger) / figure(smaller)) / math.log(larger.nodes / smaller.nodes)


def _by_fault(costs: Sequence[Costs]) -> Iterator[tuple[str, list[Costs]]]:
    for fault in dict.fromkeys(one.fault for one in costs):
        yield fault, sorted((one for one in costs if one.fault == fault), key=lambda one: one.nodes)


def _markdown(cells: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(cells[0]) + "|", *lines[1:]])


def write_json(path: Path, costs: Sequence[Costs], paged: Sequence[Paged]) -> None:
    """Everything, for comparison with other runs."""
    content = {"costs": [asdict(one) for one in costs], "pages": [asdict(one) for one in paged]}
    path.write_text(json.dumps(content, indent=1, default=_plain) + "\n")


def _plain(value: object) -> object:
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{value!r} has no place in JSON")
