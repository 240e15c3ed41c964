"""`railscope report`: what recorded datasets tell of the papers' measurements, as text, JSON or a page with pictures.

It needs no rights and no running agent, only the folders; what a recording does not tell is said, with the reason.

In JSON: bytes and counts as whole numbers, times in seconds, ratios of 1.

`matrix` has the pairs that talked, `traffic` the sums of it.  What is not known is null, and `unknown` says why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import Any, Final, TextIO

from railscope.agent.analysis.facts.fact_columns import Columns
from railscope.agent.analysis.facts.report import Report, Traffic
from railscope.agent.analysis.report.column_json import column_parts
from railscope.agent.analysis.report.measurements import BY_NUMBER
from railscope.agent.analysis.tables.missing import not_installed
from railscope.agent.config.file import ConfigError

KEYS: Final = (
    "recording",
    "gpus",
    "ops",
    "sizes",
    "communicators",
    "matrix",
    "sparsity",
    "traffic",
    "rails",
    "latency",
    "composition",
    "regularity",
    "iterations",
    "bandwidth",
    "receives",
    "scaling",
    "unknown",
    "losses",
)
"""Of the object, in their order."""


def json_parts(report: Report) -> Iterator[str]:
    """The report as JSON, indented, part by part: of what there may be millions, never all is text."""
    for number, (key, value) in enumerate(_content(report).items()):
        yield f"{',' if number else '{'}\n  {json.dumps(key)}: "
        if isinstance(value, Columns):
            yield from column_parts(value, indent=2)
        else:
            yield json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")
    yield "\n}\n"


def as_json(report: Report) -> dict[str, Any]:
    """The content of the report's JSON."""
    return {key: _list(value) if isinstance(value, Columns) else value for key, value in _content(report).items()}


def _content(report: Report) -> dict[str, Any]:
    return {
        "recording": {
            "folders": list(report.folders),
            "simulated": report.simulated,
            "began": report.began_seconds,
            "seconds": report.seconds,
            "one_of_several": report.one_of_several,
        },
        "gpus": _list(report.gpus),
        "ops": _list(report.ops),
        "sizes": report.sizes,
        "communicators": _list(report.communicators),
        "matrix": report.matrix.pairs,
        "sparsity": report.matrix.sparsity,
        "traffic": _sums(report.matrix),
        "rails": _list(report.rails),
        "latency": asdict(report.latency),
        "composition": asdict(report.composition),
        "regularity": None if report.regularity is None else asdict(report.regularity),
        "iterations": _list(report.iterations),
        "bandwidth": _list(report.bandwidth),
        "receives": _list(report.receives),
        "scaling": _list(report.scaling),
        "unknown": [
            {"row": one.row, "measurement": BY_NUMBER[one.row].name, "reason": one.reason} for one in report.unknown
        ],
        "losses": [*report.losses, *filter(None, (report.shared_rails,))],
    }


def _list(facts: Any) -> list[dict[str, Any]]:
    return [asdict(fact) for fact in facts]


def _sums(traffic: Traffic) -> dict[str, Any]:
    """Everything of the traffic but its pairs and sparsity, which have keys of their own."""
    content = {
        name: getattr(traffic, name)
        for name in (column.name for column in fields(traffic))
        if name not in ("pairs", "sparsity", "server_transmit_wire_bytes")
    }
    return content | {"server_transmit_wire_bytes": dict(traffic.server_transmit_wire_bytes)}


FINE: Final = 0
COULD_NOT_RUN: Final = 2


def run_report(parsed: Any, out: TextIO) -> int:
    """Print the report of a recording; returns 0, or 2 where there can be none, with one line on standard error."""
    try:
        from railscope.agent.analysis.report.command import json_parts
        from railscope.agent.analysis.report.html import write_html
        from railscope.agent.analysis.report.report import ReportOptions, make_report, make_runs
        from railscope.agent.analysis.report.text import as_text
        from railscope.agent.analysis.tables.datasets_of import as_datasets
        from railscope.agent.dataset.reader import DatasetError
    except ModuleNotFoundError as error:
        print(f"railscope report: {not_installed(error)}", file=sys.stderr)
        return COULD_NOT_RUN
    options = ReportOptions(
        leaf_map=parsed.leaf_map,
        engine=parsed.engine,
        memory_bytes=parsed.memory,
        only=parsed.only,
        scaling=parsed.scaling,
    )
    try:
        with as_datasets(parsed.paths, apart=parsed.runs) as folders:
            report = make_runs(folders, options) if parsed.runs else make_report(folders, options)
        # Of files, temporary datasets were read: the user's names say more.
        named = parsed.paths[:1] if parsed.runs else parsed.paths
        report = replace(report, folders=tuple(str(path) for path in named))
        if parsed.html is not None:
            write_html(report, parsed.html)
    except (ConfigError, DatasetError) as error:
        print(f"railscope report: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    out.writelines(json_parts(report) if parsed.json else [as_text(report)])
    if parsed.html is not None and not parsed.json:
        out.write(f"\nwrote {parsed.html}\n")
    return FINE
