"""What a scrape costs the agent, and what it does to a sampler beside it, against prometheus-client on the same series.

A process serves both (tests/bench/exposition_server.py); scrapes ask as Prometheus does, over HTTP, with OpenMetrics
and gzip.  A scrape's cost is the CPU time of that process from the request to the end of the answer: making families of
a snapshot, writing them down, compressing, sending.  How late the agent's sampler is there, at a millisecond, is told
for a window without scrapes and one in which they follow each other without a pause, which is more than any Prometheus
does.
"""

from __future__ import annotations

import gzip
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Final

from tests.bench.cpu_time import DISTURBED, Others
from tests.bench.results import Bound, Line, figure, ratios
from tests.bench.results import Target as Limit
from tests.bench.target import BenchError, Built
from tests.bench.tracker_cost import Load, processes, scrape_microseconds

PART: Final = "exposition"
USUAL_SERIES, MOST_SERIES = 20_000, 100_000
LIVE_COMMUNICATORS: Final = 256
_WINDOW_SECONDS: Final = 2.0
_WARM_SCRAPES: Final = 2
HEADERS: Final = {
    "Accept": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}
"""As Prometheus 2.42 asks."""
_SCHEDULER_CLOCK: Final = 2
"""Of a process' CPU clocks: the one that the scheduler keeps, in nanoseconds (clock_getcpuclockid(3))."""


@dataclass(frozen=True, slots=True)
class _Server:
    process: subprocess.Popen[str]
    series: int
    ours: HTTPConnection
    peers: HTTPConnection | None

    def cpu_ns(self) -> int:
        """All threads' time so far."""
        return time.clock_gettime_ns(~self.process.pid << 3 | _SCHEDULER_CLOCK)

    def cost_ms(self, connection: HTTPConnection) -> float:
        """CPU time of one scrape."""
        before = self.cpu_ns()
        _scrape(connection)
        return (self.cpu_ns() - before) / 1e6

    def lateness_ms(self, scrape: Callable[[], object] | None = None) -> float:
        """The 99th percentile of a millisecond sampler's lateness, with one scrape after the other or none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(_WINDOW_SECONDS, file=self.process.stdin, flush=True)
        while scrape is not None and not select.select([self.process.stdout], [], [], 0)[0]:
            scrape()
        return int(self.process.stdout.readline()) / 1e6


def measure(_built: Built, rounds: int) -> list[Line]:
    """Scrape each in turn, `rounds` times; every second round backwards.

    Raises:
        BenchError: the two do not show the same number of series.
    """
    costs: dict[str, list[float]] = {"ours": [], "peers": [], "most": []}
    live = []
    with processes() as pids:
        for _ in range(rounds):
            live.append(statistics.median(scrape_microseconds(Load(pids, communicators=LIVE_COMMUNICATORS))))
    late: dict[str, list[float]] = {"alone": [], "ours": [], "peers": []}
    others: list[float] = []
    with ExitStack() as running:
        usual = running.enter_context(serving(USUAL_SERIES, "--peer"))
        most = running.enter_context(serving(MOST_SERIES))
        assert usual.peers is not None
        ours, peers = usual.ours, usual.peers
        for connection in (ours, peers, most.ours):
            for _ in range(_WARM_SCRAPES):
                _scrape(connection)
        shown = [_series(_scrape(connection)) for connection in (ours, peers)]
        if shown[0] != shown[1]:
            raise BenchError(f"prometheus-client shows {shown[1]:,} series of {shown[0]:,}")
        turns: list[Callable[[], None]] = [
            lambda: costs["ours"].append(usual.cost_ms(ours)),
            lambda: costs["peers"].append(usual.cost_ms(peers)),
            lambda: costs["most"].append(most.cost_ms(most.ours)),
            lambda: late["alone"].append(usual.lateness_ms()),
            lambda: late["ours"].append(usual.lateness_ms(lambda: _scrape(ours))),
            lambda: late["peers"].append(usual.lateness_ms(lambda: _scrape(peers))),
        ]
        for turn in range(rounds):
            taken = Others([os.getpid(), usual.process.pid, most.process.pid])
            for step in turns[:: 1 if turn % 2 == 0 else -1]:
                step()
            others.append(taken.percent())
        return [*lines_of(costs, late, others, usual.series, most.series), live_line(live)]


def live_line(microseconds: list[float]) -> Line:
    """What a series costs where its value is read from the tables of a job's calls, and has moved; see tracker_cost."""
    return figure(
        PART,
        f"a live scrape, {LIVE_COMMUNICATORS} communicators of 8 ranks on the host",
        "µs CPU/series",
        microseconds,
        target=Limit(Bound.AT_MOST, 3),
        note="gzip included, simulated tables; a whole agent's: crowd",
    )


def lines_of(
    costs: dict[str, list[float]],
    late: dict[str, list[float]],
    others: list[float],
    usual_series: int,
    most_series: int,
) -> list[Line]:
    """The figures of all rounds; times in ms."""
    later = [during - alone for during, alone in zip(late["ours"], late["alone"], strict=True)]
    usual, most = f"a scrape of {usual_series:,} series", f"a scrape of {most_series:,} series"
    return [
        figure(PART, "CPU taken by others", "%", others, note=DISTURBED),
        figure(PART, usual, "ms CPU", costs["ours"], target=Limit(Bound.AT_MOST, 40), note="gzip included"),
        figure(PART, f"{usual}, prometheus-client", "ms CPU", costs["peers"], note="gzip included"),
        figure(PART, "prometheus-client / ours", "×", ratios(costs["peers"], costs["ours"])),
        figure(PART, most, "ms CPU", costs["most"], target=Limit(Bound.AT_MOST, 250), note="gzip included"),
        figure(PART, "1 ms sampler, p99 late, not scraped", "ms", late["alone"]),
        figure(PART, "1 ms sampler, p99 late, scraped without a pause", "ms", late["ours"]),
        figure(PART, "by how much later", "ms", later, target=Limit(Bound.AT_MOST, 1)),
        figure(PART, "1 ms sampler, p99 late, prometheus-client scraped so", "ms", late["peers"]),
    ]


@contextmanager
def serving(series: int, *arguments: str) -> Iterator[_Server]:
    """The process, while the block lasts."""
    command = [sys.executable, "-m", "tests.bench.exposition_server", str(series), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise BenchError("the exposition's server did not start; its error is above")
        told = json.loads(line)
        server = _Server(
            process,
            told["series"],
            HTTPConnection(told["ours"], timeout=60),
            HTTPConnection(told["peers"], timeout=60) if told["peers"] else None,
        )
        try:
            yield server
        finally:
            for connection in (server.ours, server.peers):
                if connection is not None:
                    connection.close()
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def _scrape(connection: HTTPConnection) -> bytes:
    """The compressed answer."""
    connection.request("GET", "/metrics", headers=HEADERS)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200 or answer.headers["Content-Encoding"] != "gzip":
        raise BenchError(f"a scrape was answered with {answer.status} {answer.headers['Content-Encoding']}")
    return body


def _series(body: bytes) -> int:
    return sum(not line.startswith(b"#") for line in gzip.decompress(body).splitlines())
