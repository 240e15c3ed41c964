"""A process that serves the same series twice, by the agent's server and by prometheus-client's; and watches the time.

    python -m tests.bench.exposition_server SERIES [--peer]

It prints one line of JSON: `ours`, `peers` (empty without --peer; address and port of each) and `series`.  Each line
"SECONDS" of standard input is answered by a line with the 99th percentile of how late a thread was, in nanoseconds,
that woke every millisecond for so long: the thread that asks for the agent's counters.

The series are a typical node's (dashboards/typical_node.py), with as many communicators as it takes; two states of it
are shown in turn, so that values change from scrape to scrape.  prometheus-client has one Gauge a series, as its users
have, and shows the same lines.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from railscope.agent.facts.snapshot import Snapshot
from railscope.dashboards.typical_node import COMMUNICATORS_OF_A_GPU, GPUS, typical_node
from railscope.exporters.series.budget import SeriesBudget
from railscope.exporters.series.families import make_families
from railscope.exporters.series.family import Family
from railscope.exporters.web.http import MetricsServer, ServerSettings
from railscope.probes.clock import SystemClock
from railscope.probes.native import beats
from railscope.probes.netdev.rtnetlink_counters import NetlinkCounters
from tests.bench.target import BenchError

PERIOD_NS: Final = 1_000_000
_HEARING_SECONDS: Final = 0.05
_SLOTS: Final = 4096
_PATIENCE_NS: Final = 1_000_000_000
_ADDRESS: Final = "127.0.0.1"
_UNLIMITED: Final = 10**9
_USUAL: Final = GPUS * COMMUNICATORS_OF_A_GPU


def node_with(series: int) -> Snapshot:
    """A node that shows at least so many series, and at most a communicator's more."""
    usual = series_of(typical_node())
    of_two = series_of(typical_node(_USUAL + 2)) - usual  # one of them tells the signature of both
    communicators = _USUAL + 2 * max(0, (series - usual) // of_two)
    while series_of(node := typical_node(communicators)) < series:
        communicators += 1
    return node


def series_of(node: Snapshot) -> int:
    return sum(family.series() for family in make_families(node, SeriesBudget(_UNLIMITED)))


def lateness_ns(seconds: float, period_ns: int = PERIOD_NS) -> int:
    """The 99th percentile of how late the agent's sampler asks for counters once a period; missed beats are late.

    Raises:
        BenchError: the sampler's thread cannot run here, or the counters cannot be asked for by it.
    """
    thread = beats.start_thread()
    with closing(NetlinkCounters(SystemClock())) as counters:
        question = counters.question()
        if thread is None or question is None:
            raise BenchError("the sampler's own thread cannot ask for this machine's network counters")
        asked = thread.ask(question, period_ns, time.monotonic_ns() + period_ns, _SLOTS)
        end = time.monotonic() + seconds
        found: list[beats.Answer] = []
        while time.monotonic() < end:
            time.sleep(_HEARING_SECONDS)
            found += asked.read_answers().answers
            asked.release()
        asked.cancel(_PATIENCE_NS)
        thread.stop(_PATIENCE_NS / 1e9)
    return round(statistics.quantiles(late_ns([(one.due_ns, one.before_ns) for one in found], period_ns), n=100)[98])


def late_ns(beats_asked: Sequence[tuple[int, int]], period_ns: int) -> list[int]:
    """How late each beat was, from (due, asked) of those that were not missed; missed ones until the next was asked."""
    late: list[int] = []
    last_ns = None
    for due_ns, asked_ns in beats_asked:
        first_ns = due_ns if last_ns is None else last_ns + period_ns
        late += [asked_ns - missed_ns for missed_ns in range(first_ns, due_ns, period_ns)]
        late.append(asked_ns - due_ns)
        while due_ns + period_ns <= asked_ns:  # missed by then, with this one
            due_ns += period_ns
            late.append(asked_ns - due_ns)
        last_ns = due_ns
    return late


def gauges(shown: Iterable[Family]) -> CollectorRegistry:
    """A Gauge for every series."""
    registry = CollectorRegistry()
    for family in shown:
        name, labels = family.metric.name, family.labels
        if family.samples:
            gauge = Gauge(name, family.metric.help, labels, registry=registry)
            for values, value in family.samples:
                _child(gauge, values).set(value)
        if family.histograms:
            bucket = Gauge(f"{name}_bucket", family.metric.help, (*labels, "le"), registry=registry)
            count = Gauge(f"{name}_count", family.metric.help, labels, registry=registry)
            total = Gauge(f"{name}_sum", family.metric.help, labels, registry=registry)
            for values, histogram in family.histograms:
                ends = (*map(str, histogram.bounds), "+Inf")
                for end, below in zip(ends, accumulate(histogram.counts), strict=True):
                    _child(bucket, (*values, end)).set(below)
                _child(count, values).set(sum(histogram.counts))
                if histogram.sum is not None:
                    _child(total, values).set(histogram.sum)
    return registry


def _child(gauge: Gauge, values: tuple[str | None, ...]) -> Gauge:
    return gauge.labels(*(value or "" for value in values)) if values else gauge


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("series", type=int)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    one = node_with(options.series)
    moved = tuple(replace(each, enqueued=2, inflight_seconds=0.5) for each in one.collectives.communicators)
    other = replace(one, collectives=replace(one.collectives, communicators=moved))
    turns = itertools.cycle((one, other))
    server = MetricsServer(
        ServerSettings(listen_address=f"{_ADDRESS}:0"),
        snapshot=lambda: next(turns),
        healthy=lambda: (True, "ok"),
        ready=lambda: (True, "ready"),
        budget=SeriesBudget(_UNLIMITED),
    )
    peers = ""
    if options.peer:
        peer, _ = start_http_server(0, _ADDRESS, gauges(make_families(one, SeriesBudget(_UNLIMITED))))
        peers = f"{_ADDRESS}:{peer.server_port}"
    with server:
        gc.collect()  # as the agent does after its start
        gc.freeze()
        ours = f"{_ADDRESS}:{server.port}"
        print(json.dumps({"ours": ours, "peers": peers, "series": series_of(one)}), flush=True)
        for line in sys.stdin:
            print(lateness_ns(float(line)), flush=True)


if __name__ == "__main__":
    main()
