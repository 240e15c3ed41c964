"""A process that serves metrics of a typical node, for tests that attack it.

    python -m tests.unit.hostile_server SERIES [WEB_CONFIG]

Prints its port; after each line of standard input a line of JSON, see `Told`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from railscope.dashboards.typical_node import typical_node
from railscope.exporters.series.budget import SeriesBudget
from railscope.exporters.web.config import WebConfigFile
from railscope.exporters.web.http import MetricsServer, ServerSettings


@dataclass(frozen=True, slots=True)
class Told:
    """What the process takes, and has done."""

    renderings: int
    descriptors: int
    threads: int
    resident_bytes: int
    log_lines: int
    refusals: dict[str, int]


class CountingHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines = 0

    def emit(self, _record: logging.LogRecord) -> None:
        self.lines += 1


def main() -> None:
    communicators = int(sys.argv[1])
    web = WebConfigFile(Path(sys.argv[2])) if len(sys.argv) > 2 else None
    node, renderings, lines = typical_node(communicators), 0, CountingHandler()
    logging.getLogger("railscope").addHandler(lines)
    logging.getLogger("railscope").setLevel(logging.INFO)

    def snapshot() -> object:
        nonlocal renderings
        renderings += 1
        return node

    server = MetricsServer(
        ServerSettings(listen_address="127.0.0.1:0"),
        snapshot=snapshot,  # type: ignore[arg-type]
        healthy=lambda: (True, "ok"),
        ready=lambda: (True, "ready"),
        budget=SeriesBudget(10**9),
        web=web,
    )
    process = psutil.Process()
    with server:
        print(server.port, flush=True)
        for _ in sys.stdin:
            told = Told(
                renderings,
                process.num_fds(),
                threading.active_count(),
                process.memory_info().rss,
                lines.lines,
                dict(server.refusals()),
            )
            print(json.dumps(asdict(told)), flush=True)


if __name__ == "__main__":
    main()
