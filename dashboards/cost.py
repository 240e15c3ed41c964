"""Estimates what railscope costs a Prometheus: series, samples, disk, memory and CPU time, from one node's series.

The node is dashboards/typical_node.py's, or a real one whose exposition is given.  What a sample takes on disk was
measured: `python -m tests.stack.block_size` scrapes real agents beside a real job with Prometheus 2.42 and reads the
block it writes.  What servers take of memory and CPU time is dashboards/server_cost.py's.  Everything else is
arithmetic on these.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from railscope.agent.config.file import ConfigError
from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import METRICS
from railscope.agent.facts.snapshot import Snapshot
from railscope.dashboards import recorded
from railscope.dashboards.server_cost import SERVERS, ServerCost, estimate_server_cost
from railscope.exporters.series.families import make_families
from railscope.exporters.series.lean import FULL, LEAN, LeanSeries

BYTES_PER_SAMPLE: Final = 3.1
"""Of a block's chunks: 120,261 samples of two agents beside a busy job.  Where more stands still it is less."""
INDEX_BYTES_PER_SERIES: Final = 104.0
"""Of the same block's index.  Prometheus merges blocks, so that a series stands about once a day in one."""
RECORDED_LIKE: Final = {one.name: one.like.name for one in recorded.SERIES if one.like is not None}
"""What the shipped rules record while nothing stalls: as many series as this metric has.  Of communicators it is the
most that they can be, as if no two ranks of a node shared one."""
OF_A_SCRAPE: Final = (
    "up",
    "scrape_duration_seconds",
    "scrape_samples_post_metric_relabeling",
    "scrape_samples_scraped",
    "scrape_series_added",
)
"""What Prometheus itself adds for each target."""
KEPT: Final = frozenset({"up"}).union(
    metric.name
    for metric in (
        catalogue.BUILD_INFO,
        catalogue.COMM_INFO,
        catalogue.RAIL_INFO,
        catalogue.GPU_INFO,
        catalogue.COLLECTIVE_CALLS,
        catalogue.COLLECTIVE_PAYLOAD_BYTES,
        catalogue.COLLECTIVE_COMPLETED_PAYLOAD_BYTES,
        catalogue.COLLECTIVE_COMPLETED_BUS_BYTES,
        catalogue.COLLECTIVE_COMPLETED_SECONDS,
        catalogue.RAIL_UP,
        catalogue.RAIL_TRANSMIT_BYTES,
        catalogue.RAIL_RECEIVE_BYTES,
        catalogue.RAIL_BYTES_BY_ORIGIN,
        catalogue.RAIL_COUNTER_BY_SEVERITY,
        catalogue.STALLS,
        catalogue.COMM_STALL_SECONDS,
        catalogue.COMM_ERRORS,
        catalogue.COMM_FAILED_OVER,
        catalogue.EVENTS_LOST,
        catalogue.SERIES_DROPPED,
        catalogue.OVERHEAD_SECONDS,
    )
)
"""Of single series, what deploy/prometheus/remote-write.yml and federation.yml keep for long."""
KEPT_EVENTS: Final = (catalogue.RAIL_COUNTER.name, ("page", "warn"))
"""And of this metric, with these severities."""
MOST_GPUS: Final = 1_000_000_000
"""Beyond any fleet; figures stay ones that can be shown."""
SECONDS_OF_A_DAY: Final = 86_400
DAYS_OF_A_YEAR: Final = 365
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_SAMPLE: Final = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?P<labels>.*)\})? [^ ]+( [0-9]+)?")
_SEVERITY: Final = re.compile(r'(?:^|,)severity="([a-z]+)"')


class NotAnExpositionError(ValueError):
    """The text is not railscope's exposition; the message says why."""


@dataclass(frozen=True, slots=True)
class Node:
    """How many series one node shows."""

    families: Mapping[str, int]
    """By metric: a histogram's buckets, count and sum are series each."""
    kept: int
    """Of them, those that are kept for long."""

    @property
    def series(self) -> int:
        return sum(self.families.values())

    @property
    def ranks(self) -> int:
        """Ends of communicators."""
        return self.families.get(catalogue.COMM_ENQUEUED.name, 0)

    @property
    def of_communicators(self) -> int:
        """Series that end with their communicators, recorded ones included: a job that starts anew has others."""
        named = {metric.name for metric in METRICS if metric.labels[:1] == ("comm",)}
        recorded_of = sum(self.families.get(metric, 0) for metric in RECORDED_LIKE.values() if metric in named)
        return sum(count for name, count in self.families.items() if name in named) + recorded_of

    @property
    def recorded(self) -> int:
        """Series that the rules make of them."""
        return sum(self.families.get(metric, 0) for metric in RECORDED_LIKE.values())


@dataclass(frozen=True, slots=True)
class Cost:
    """What so many GPUs cost."""

    gpus: int
    nodes: int
    series: int
    """That the agents show, that Prometheus adds to each scrape, and that the rules record."""
    samples_per_second: float
    bytes_per_day: float
    kept_series: int
    """In a store for long, filled by the shipped remote write."""
    kept_samples_per_second: float
    """That remote write sends."""
    kept_bytes_per_year: float
    new_series_per_day: int
    """That come in place of others where jobs start anew."""
    servers: tuple[ServerCost, ...]
    """What it takes of each server that may hold all series."""


def count_series(snapshot: Snapshot, profile: str = FULL) -> Node:
    """Count a snapshot's series, as Prometheus would store them; in profile lean while no process stands."""
    found: Counter[str] = Counter()
    kept = 0
    families = make_families(snapshot)
    for family in LeanSeries().select(families, snapshot) if profile == LEAN else families:
        name = family.metric.name
        found[name] += family.series()
        if name in KEPT:
            kept += family.series()
        elif name == KEPT_EVENTS[0]:
            severity = family.labels.index("severity")
            kept += sum(labels[severity] in KEPT_EVENTS[1] for labels, _ in family.samples)
    return Node(found, kept)


def count_exposition_series(text: str) -> Node:
    """Count the series of what a real agent shows.

    Raises:
        NotAnExpositionError: a line is none of an exposition's, or nothing is railscope's.
    """
    found: Counter[str] = Counter()
    kept = 0
    histograms = set(re.findall(r"^# TYPE (\S+) histogram$", text, re.MULTILINE))
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        sample = _SAMPLE.match(line)
        if sample is None:
            raise NotAnExpositionError(f"line {number} is not a sample: {line[:60]!r}")
        name = sample["name"]
        family = re.sub(r"_(bucket|count|sum)$", "", name)
        found[family if family in histograms else name] += 1
        severity = _SEVERITY.search(sample["labels"] or "")
        kept += name in KEPT
        kept += name == KEPT_EVENTS[0] and severity is not None and severity[1] in KEPT_EVENTS[1]
    if not any(name.startswith(catalogue.PREFIX) for name in found):
        raise NotAnExpositionError("nothing in it is railscope's: give what curl http://NODE:9779/metrics prints")
    return Node(found, kept)


def estimate_cost(node: Node, gpus: int, gpus_per_node: int, interval_seconds: float, restarts_per_day: float) -> Cost:
    """What a fleet of such nodes costs Prometheus; `restarts_per_day`: how often each node's job starts anew.

    Raises:
        ConfigError: there is no such fleet.
    """
    if gpus > MOST_GPUS:
        raise ConfigError(f"--gpus: a fleet has {MOST_GPUS:,} GPUs at most")
    nodes = math.ceil(gpus / gpus_per_node)
    series = nodes * (node.series + len(OF_A_SCRAPE) + node.recorded)
    kept = nodes * (node.kept + len(KEPT.intersection(OF_A_SCRAPE)) + node.recorded)
    new_per_day = round(nodes * node.of_communicators * restarts_per_day)
    index_per_day = new_per_day * INDEX_BYTES_PER_SERIES
    return Cost(
        gpus=gpus,
        nodes=nodes,
        series=series,
        samples_per_second=series / interval_seconds,
        bytes_per_day=_bytes_per_day(series, interval_seconds) + index_per_day,
        kept_series=kept,
        kept_samples_per_second=kept / interval_seconds,
        kept_bytes_per_year=_bytes_per_day(kept, interval_seconds) * DAYS_OF_A_YEAR,
        new_series_per_day=new_per_day,
        servers=tuple(
            estimate_server_cost(
                server,
                series=series,
                samples_per_second=nodes * (node.series + len(OF_A_SCRAPE)) / interval_seconds,
                ranks=nodes * node.ranks,
                new_series_per_day=new_per_day,
            )
            for server in SERVERS
        ),
    )


def estimate_costs(
    node: Node, gpus: Iterable[int], gpus_per_node: int, interval_seconds: float, restarts_per_day: float
) -> list[Cost]:
    """What several fleets cost Prometheus."""
    return [estimate_cost(node, one, gpus_per_node, interval_seconds, restarts_per_day) for one in gpus]


def _bytes_per_day(series: int, interval_seconds: float) -> float:
    return series * (SECONDS_OF_A_DAY / interval_seconds * BYTES_PER_SAMPLE + INDEX_BYTES_PER_SERIES)


def as_text(node: Node, described: str, costs: Sequence[Cost], interval_seconds: float, retention_days: float) -> str:
    """What fleets cost Prometheus, as a table with what it rests on."""
    rows = [("GPUs", "nodes", "series", "samples/s", f"{retention_days:g} days", "kept: series", "a year")]
    rows += [
        (
            f"{one.gpus:,}",
            f"{one.nodes:,}",
            f"{one.series:,}",
            f"{one.samples_per_second:,.0f}",
            format_bytes(one.bytes_per_day * retention_days),
            f"{one.kept_series:,}",
            format_bytes(one.kept_bytes_per_year),
        )
        for one in costs
    ]
    table = _aligned(rows)
    return (
        f"{described}: {node.series:,} series; rules record {node.recorded:,} more.  Scraped every "
        f"{interval_seconds:g} s,\n{BYTES_PER_SAMPLE:g} bytes a sample (measured).  Kept: what "
        "deploy/prometheus/remote-write.yml lets through.\n\n" + table + f"\n\n{_servers_as_text(node, costs)}"
    )


def _servers_as_text(node: Node, costs: Sequence[Cost]) -> str:
    rows = [("GPUs", *(cell for one in SERVERS for cell in (one.name, "cores", "of them rules")))]
    rows += [
        (
            f"{cost.gpus:,}",
            *(
                cell
                for one in cost.servers
                for cell in (format_bytes(one.resident_bytes), _cores(one.cores), _cores(one.rule_cores))
            ),
        )
        for cost in costs
    ]
    return (
        "Memory and CPU time of a server that holds all of it, reckoned from 8 to 128 simulated nodes\n"
        f"(measured); a job that starts anew makes {node.of_communicators:,} series of a node anew.\n\n"
        + _aligned(rows)
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _cores(cores: float) -> str:
    return f"{cores:.2f}" if cores < 10 else f"{cores:.0f}"


def render_families(node: Node, most: int) -> str:
    """The metrics with the most series."""
    largest = sorted(node.families.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"{series:>7,}  {name}" for name, series in largest[:most]]
    rest = largest[most:]
    if rest:
        lines.append(f"{sum(series for _, series in rest):>7,}  {len(rest)} other metrics")
    return "\n".join(lines)


def as_json(node: Node, costs: Sequence[Cost], interval_seconds: float) -> str:
    """What fleets cost Prometheus, with the units in the names."""
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


def format_bytes(size_bytes: float) -> str:
    """Bytes of Prometheus's storage in powers of a thousand, with three digits."""
    unit = 0
    while size_bytes >= 999.5 and unit < len(_UNITS) - 1:
        size_bytes /= 1000
        unit += 1
    digits = 0 if size_bytes >= 99.95 or not unit else 1
    return f"{size_bytes:.{digits}f} {_UNITS[unit]}"
