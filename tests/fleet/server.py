"""A Prometheus of the bench: asked over HTTP, and watched as a process."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from tests.bench.cpu_time import process_time

ANSWER_SECONDS: Final = 600.0


class Server:
    """A Prometheus at a URL, which is this process."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid

    def query(self, expression: str, at: float | None = None) -> list[tuple[Mapping[str, str], float]]:
        """Labels and value of each series that an expression gives; `at` None: now."""
        return [(one["metric"], float(one["value"][1])) for one in self.ask(expression, at)["result"]]

    def ask(self, expression: str, at: float | None = None) -> Any:
        """The answer to a question about one moment, seconds since the Unix epoch; None: now."""
        asked = {"query": expression, "timeout": f"{ANSWER_SECONDS:.0f}s"}
        if at is not None:
            asked["time"] = f"{at:.3f}"
        return self.call("query", urlencode(asked).encode())

    def call(self, what: str, body: bytes | None = None) -> Any:
        """What Prometheus' HTTP interface answers."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{what}", body, timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)["data"]

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        return process_time(self.pid).cpu_ns / 1e9

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10
