"""A report as JSON, in parts, so that millions of rows are never in memory as text.

Bytes and counts are whole numbers, times in seconds, ratios of 1.  `matrix` has the pairs that talked, `traffic` the
sums of it.  What is not known is null, and `unknown` says why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from functools import cache
from operator import attrgetter
from typing import Any, Final

from railscope.agent.analysis.facts.fact_columns import Columns
from railscope.agent.analysis.facts.report import Report, Traffic
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
    "owners",
    "transfers",
    "latency",
    "composition",
    "regularity",
    "iterations",
    "bandwidth",
    "receives",
    "role_times",
    "waiting",
    "scaling",
    "unknown",
    "losses",
)
"""Of the object, in their order."""
_AT_A_TIME: Final = 10_000
"""Facts that are written together."""
_NO_NAMES: Final[Mapping[str, str]] = {}


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
        "owners": _list(report.owners),
        "transfers": _list(report.transfers),
        "latency": asdict(report.latency),
        "composition": asdict(report.composition),
        "regularity": None if report.regularity is None else asdict(report.regularity),
        "iterations": _list(report.iterations),
        "bandwidth": _list(report.bandwidth),
        "receives": _list(report.receives),
        "role_times": _list(report.role_times),
        "waiting": None if report.waiting is None else asdict(report.waiting),
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


def column_parts(facts: Columns[Any], indent: int, names: Mapping[str, str] = _NO_NAMES) -> Iterator[str]:
    """Long columns of a report as JSON, as the standard library would write them, only ten times as fast.

    Args:
        indent: spaces before the array's closing bracket.
        names: keys that are not called as the facts' fields.
    """
    if not len(facts):
        yield "[]"
        return
    columns = [column.name for column in fields(facts[0])]
    inner = " " * (indent + 2)
    lines = ",\n".join(f'{inner}  "{names.get(name, name)}": %s' for name in columns)
    form = f"{inner}{{\n{lines}\n{inner}}}"
    values = attrgetter(*columns)
    for first in range(0, len(facts), _AT_A_TIME):
        written = ",\n".join([form % tuple(map(_token, values(fact))) for fact in facts[first : first + _AT_A_TIME]])
        yield f"{',' if first else '['}\n{written}"
    yield f"\n{' ' * indent}]"


def _token(value: int | str) -> int | str:
    return value if isinstance(value, int) else _quoted(value)


@cache
def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
