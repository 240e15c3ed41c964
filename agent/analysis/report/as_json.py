"""A report as one JSON object, for programs: bytes and counts as whole numbers, times in seconds, ratios of 1.

`matrix` has the pairs that talked, `traffic` the sums of it.  What is not known is null, and `unknown` says why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any, Final

from railscope.agent.analysis.facts.fact_columns import Columns
from railscope.agent.analysis.facts.report import Report, Traffic
from railscope.agent.analysis.report.column_json import column_parts
from railscope.agent.analysis.report.measurements import BY_NUMBER

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
    """The JSON, indented, with a newline at its end, part by part: of what there may be millions, never all is text."""
    for number, (key, value) in enumerate(_content(report).items()):
        yield f"{',' if number else '{'}\n  {json.dumps(key)}: "
        if isinstance(value, Columns):
            yield from column_parts(value, indent=2)
        else:
            yield json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")
    yield "\n}\n"


def as_json(report: Report) -> dict[str, Any]:
    """The JSON's content."""
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
