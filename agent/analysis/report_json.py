"""A report as one JSON object, for programs: bytes and counts as whole numbers, times in seconds, ratios of 1.

`matrix` has the pairs that talked, `traffic` the sums of it.  What is not known is null, and `unknown` says why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import cache
from operator import attrgetter
from typing import Any, Final

from agent.analysis.fact_columns import Columns, PairTraffic, SizeUse
from agent.analysis.measurements import BY_NUMBER
from agent.analysis.report_facts import Report, Traffic

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


_AT_A_TIME: Final = 10_000
"""Facts of a column that are written together."""


def json_parts(report: Report) -> Iterator[str]:
    """The JSON, indented, with a newline at its end, part by part: of what there may be millions, never all is text."""
    for number, (key, value) in enumerate(_content(report).items()):
        yield f"{',' if number else '{'}\n  {json.dumps(key)}: "
        if isinstance(value, Columns) and len(value):
            yield from _column_parts(value)
        else:
            plain = [] if isinstance(value, Columns) else value
            yield json.dumps(plain, indent=2, ensure_ascii=False).replace("\n", "\n  ")
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
        "losses": list(report.losses),
    }


def _column_parts(facts: Columns[Any]) -> Iterator[str]:
    """The facts as the standard library would write them, only ten times as fast."""
    names = [column.name for column in fields(PairTraffic if isinstance(facts[0], PairTraffic) else SizeUse)]
    form = "    {\n" + ",\n".join(f'      "{name}": %s' for name in names) + "\n    }"
    values = attrgetter(*names)
    for first in range(0, len(facts), _AT_A_TIME):
        chunk = facts[first : first + _AT_A_TIME]
        lines = ",\n".join([form % tuple(map(_token, values(fact))) for fact in chunk])
        yield f"{',' if first else '['}\n{lines}"
    yield "\n  ]"


def _token(value: int | str) -> int | str:
    return value if isinstance(value, int) else _quoted(value)


@cache
def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


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
