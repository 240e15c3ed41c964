"""The cost of a fleet's series as a table for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from railscope.dashboards.cost import BYTES_PER_SAMPLE, INDEX_BYTES_PER_SERIES, Cost, Node

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def text(node: Node, described: str, costs: Sequence[Cost], interval_seconds: float, retention_days: float) -> str:
    """The table, with what it rests on."""
    rows = [("GPUs", "nodes", "series", "samples/s", f"{retention_days:g} days", "kept: series", "a year")]
    rows += [
        (
            f"{one.gpus:,}",
            f"{one.nodes:,}",
            f"{one.series:,}",
            f"{one.samples_per_second:,.0f}",
            amount(one.bytes_per_day * retention_days),
            f"{one.kept_series:,}",
            amount(one.kept_bytes_per_year),
        )
        for one in costs
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return (
        f"{described}: {node.series:,} series; rules record {node.recorded:,} more.  Scraped every "
        f"{interval_seconds:g} s,\n{BYTES_PER_SAMPLE:g} bytes a sample (measured).  Kept: what "
        "deploy/prometheus/remote-write.yml lets through.\n\n" + table
    )


def by_family(node: Node, most: int) -> str:
    """The metrics with the most series."""
    largest = sorted(node.families.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"{series:>7,}  {name}" for name, series in largest[:most]]
    rest = largest[most:]
    if rest:
        lines.append(f"{sum(series for _, series in rest):>7,}  {len(rest)} other metrics")
    return "\n".join(lines)


def as_json(node: Node, costs: Sequence[Cost], interval_seconds: float) -> str:
    """Everything, with the units in the names."""
    facts = {
        "node": {
            "series": node.series,
            "recorded_series": node.recorded,
            "kept_series": node.kept,
            "series_by_metric": dict(node.families),
        },
        "scrape_interval_seconds": interval_seconds,
        "bytes_per_sample": BYTES_PER_SAMPLE,
        "index_bytes_per_series": INDEX_BYTES_PER_SERIES,
        "fleets": [asdict(one) for one in costs],
    }
    return json.dumps(facts, indent=1)


def amount(size_bytes: float) -> str:
    """Bytes in powers of a thousand, with three digits."""
    unit = 0
    while size_bytes >= 999.5 and unit < len(_UNITS) - 1:
        size_bytes /= 1000
        unit += 1
    digits = 0 if size_bytes >= 99.95 or not unit else 1
    return f"{size_bytes:.{digits}f} {_UNITS[unit]}"
