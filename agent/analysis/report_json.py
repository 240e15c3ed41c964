"""A report as one JSON object, for programs: bytes and counts as whole numbers, times in seconds, ratios of 1.

`matrix` has the pairs that talked, `traffic` the sums of it.  What is not known is null, and `unknown` says why.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any, Final

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


def as_json_text(report: Report) -> str:
    """The JSON, indented, with a newline at its end."""
    return json.dumps(as_json(report), indent=2, ensure_ascii=False) + "\n"


def as_json(report: Report) -> dict[str, Any]:
    """The JSON's content."""
    return {
        "recording": {
            "folders": list(report.folders),
            "simulated": report.simulated,
            "began": report.began_seconds,
            "seconds": report.seconds,
        },
        "gpus": _list(report.gpus),
        "ops": _list(report.ops),
        "sizes": _list(report.sizes),
        "communicators": _list(report.communicators),
        "matrix": _list(report.matrix.pairs),
        "sparsity": report.matrix.sparsity,
        "traffic": _sums(report.matrix),
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
