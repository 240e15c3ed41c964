"""A real Prometheus for tests: Debian's, on a free port, with a data folder of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.prometheus_query import Endpoint, PrometheusError, PrometheusStore


def tool(name: str) -> str:
    """The path of one of Debian's programs."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: install Debian's package prometheus")
    return found


@contextmanager
def prometheus(folder: Path, scrape_configs: str, rules: Sequence[Path] = ()) -> Iterator[str]:
    """Run one that scrapes and evaluates every second; yields its URL."""
    program = tool("prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "prometheus.yml"
    files = "".join(f"  - {file}\n" for file in rules)
    config.write_text(
        "global:\n  scrape_interval: 1s\n  evaluation_interval: 1s\n"
        + (f"rule_files:\n{files}" if rules else "")
        + scrape_configs
    )
    url = f"http://127.0.0.1:{port}"
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            store = PrometheusStore(Endpoint(url))
            until(lambda: answers(store), "Prometheus to answer")
            yield url
        finally:
            process.terminate()
            process.wait(30)


def answers(store: PrometheusStore) -> bool:
    try:
        return bool(store.query("time()"))
    except PrometheusError:
        return False


def until(holds: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.1)
