"""A real Prometheus for tests: Debian's, on a free port, with a data folder of its own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from railscope.agent.cluster.fleet.prometheus import Endpoint, PrometheusError, PrometheusStore

PATIENCE_SECONDS: Final = 60.0
"""For a server that shares the machine with other tests; operators are told after ten."""


def tool(name: str, package: str = "prometheus") -> str:
    """The path of one of Debian's programs."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: install Debian's package {package}")
    return found


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextmanager
def prometheus(
    folder: Path, scrape_configs: str, rules: Sequence[Path] = (), arguments: Sequence[str] = ()
) -> Iterator[str]:
    """Run one that scrapes and evaluates every second; yields its URL.

    `scrape_configs` may hold other parts of a configuration too, but for `global` and `rule_files`.
    """
    port = free_port()
    config = folder / "prometheus.yml"
    files = "".join(f"  - {file}\n" for file in rules)
    config.write_text(
        "global:\n  scrape_interval: 1s\n  evaluation_interval: 1s\n"
        + (f"rule_files:\n{files}" if rules else "")
        + scrape_configs
    )
    command = [tool("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", *arguments]
    with running(command, folder / "prometheus.log"):
        yield answering(f"http://127.0.0.1:{port}", "Prometheus")


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server for as long as the `with` block lasts."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def store_at(url: str) -> PrometheusStore:
    """The server at this URL, asked with patience."""
    return PrometheusStore(Endpoint(url, timeout_seconds=PATIENCE_SECONDS))


def alert_annotations(url: str, name: str, comm: str) -> dict[str, str]:
    """What a communicator's alert says as of now, at the Prometheus with this URL; empty: it does not fire."""
    with urllib.request.urlopen(f"{url}/api/v1/alerts", timeout=10) as answer:
        alerts = json.load(answer)["data"]["alerts"]
    wanted = {"alertname": name, "comm": comm}.items()
    said = [one["annotations"] for one in alerts if one["state"] == "firing" and wanted <= one["labels"].items()]
    assert len(said) <= 1, said
    return said[0] if said else {}


def answering(url: str, name: str) -> str:
    """The URL, once queries are answered there."""
    store = store_at(url)
    until(lambda: answers(store), f"{name} to answer")
    return url


def answers(store: PrometheusStore) -> bool:
    try:
        return bool(store.query("time()"))
    except PrometheusError:
        return False


def until(holds: Callable[[], bool], what: str, seconds: float = 60, *, instead: Callable[[], str] = str) -> None:
    """Wait until something holds; `instead`: what to say of how it is if it does not."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"waited {seconds} s for {what} {instead()}".rstrip()
        time.sleep(0.1)
