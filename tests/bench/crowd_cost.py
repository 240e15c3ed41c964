"""What an agent takes beside a process with 2,048 communicators of two ranks: while it works, rests and is stopped.

The agent watches that process alone, counts calls, and is not scraped but in the rows that say so: a live scrape reads
the kernel's tables and finds values that have moved, other than one of the exposition's part, which renders alone.
"""

from __future__ import annotations

import gzip
import time
from http.client import HTTPConnection
from typing import Final

from tests.bench.crowded_process import CrowdedProcess, core_percent, scrape
from tests.bench.exposition_cost import HEADERS
from tests.bench.results import Bound, Line, figure
from tests.bench.results import Target as Limit
from tests.bench.target import Built
from tests.fabric.agent_process import AgentProcess

PART: Final = "crowd"
COMMUNICATORS: Final = 2048
_SCRAPES: Final = 9
_SETTLE_SECONDS: Final = 4.0
_SECONDS: Final = 8.0
_BETWEEN_SECONDS: Final = 0.3
_UNLIMITED: Final = ("--limit.series", "1000000")


def measure(_built: Built, rounds: int) -> list[Line]:
    """Watch such a process, `rounds` times; raises BenchError where it ends."""
    working: list[float] = []
    resting: list[float] = []
    stopped: list[float] = []
    series = 0
    scrape_us: list[float] = []
    for _ in range(rounds):
        with CrowdedProcess(COMMUNICATORS, 1.0) as crowd, _agent(crowd) as agent:
            pid = agent.process.pid
            crowd.begin()
            time.sleep(_SETTLE_SECONDS)
            working.append(core_percent(pid, _SECONDS))
            series, cost_us = live_scrape(agent)
            scrape_us.append(cost_us)
            with crowd.stopped():
                time.sleep(_SETTLE_SECONDS)
                stopped.append(core_percent(pid, _SECONDS))
        with CrowdedProcess(COMMUNICATORS, 0.0) as crowd, _agent(crowd) as agent:
            crowd.begin()
            time.sleep(_SETTLE_SECONDS)
            resting.append(core_percent(agent.process.pid, _SECONDS))
    most = Limit(Bound.AT_MOST, 5)
    whose = f"{COMMUNICATORS:,} communicators of two ranks in one process"
    return [
        figure(PART, f"{whose}, each called once a second", "% of a core", working, target=most),
        figure(PART, f"{whose}, called once", "% of a core", resting, target=most),
        figure(PART, f"{whose}, stopped", "% of a core", stopped, target=most),
        figure(
            PART, f"a live scrape of {series:,} series", "µs CPU/series", scrape_us, target=Limit(Bound.AT_MOST, 3)
        ),
    ]  # fmt: skip


def live_scrape(agent: AgentProcess) -> tuple[int, float]:
    """Series of an agent's scrape, and the median of what each costs it, µs."""
    connection = HTTPConnection("127.0.0.1", agent.port)
    costs, lines = [], list[bytes]()
    for _ in range(_SCRAPES):
        time.sleep(_BETWEEN_SECONDS)
        cost_ms, body = scrape(connection, HEADERS, agent.process.pid)
        costs.append(cost_ms)
        lines = [line for line in gzip.decompress(body).splitlines() if not line.startswith(b"#")]
    connection.close()
    return len(lines), sorted(costs)[len(costs) // 2] * 1e3 / len(lines)


def _agent(crowd: CrowdedProcess) -> AgentProcess:
    return AgentProcess("--pid", str(crowd.pid), "--level", "counts", *_UNLIMITED)
