"""The servers around a simulated fleet: a real Prometheus and Alertmanager, with the shipped rules and routes."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Final

from tests.faults.cluster import until
from tests.fleet.rule_cost import LOADED
from tests.fleet.server import ANSWER_SECONDS, Server
from tests.fleet.simulation import Fault
from tests.serving import QuietHandler
from tests.serving import running as serving
from tests.stack.prometheus import answering, free_port, running, tool
from tests.stack.stack import DEPLOY

INTERVAL_SECONDS: Final = 15
_ON_CALL: Final = "/on-call"


@dataclass(frozen=True, slots=True)
class Page:
    """One notification of the person on call."""

    alerts: tuple[str, ...]
    """Names of those that fire."""
    size_bytes: int
    linked: bool
    """Every alert in it has the address of its runbook."""


class Pagers(ThreadingHTTPServer):
    """Takes what Alertmanager sends, and keeps what goes to the person on call."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Pager)
        self.pages: list[Page] = []


class _Pager(QuietHandler):
    server: Pagers

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, "text/plain", b"")
        facts = json.loads(body)
        firing = [one for one in facts["alerts"] if one["status"] == "firing"]
        if firing and self.path.endswith(_ON_CALL):
            names = tuple(sorted({one["labels"]["alertname"] for one in firing}))
            linked = all(one["annotations"].get("runbook_url", "").startswith("http") for one in firing)
            self.server.pages.append(Page(names, len(body), linked))


class Stack(Server):
    """The Prometheus of one fleet, and what is around it."""

    def __init__(self, nodes: int, pagers: Pagers, url: str, pid: int, node_port: int) -> None:
        super().__init__(url, pid)
        self.nodes, self.pagers = nodes, pagers
        self._node_port = node_port

    def break_by(self, fault: Fault) -> None:
        """Mend what is broken, and let this happen."""
        urllib.request.urlopen(f"http://127.0.0.1:{self._node_port}/break/{fault}", timeout=60).close()

    def groups(self) -> dict[str, float]:
        """How long the last evaluation of each group of rules took, seconds."""
        return {one["name"]: one["evaluationTime"] for one in self.call("rules")["groups"]}


@contextmanager
def around(nodes: int, folder: Path, profile: str) -> Iterator[Stack]:
    """Serve a fleet of so many nodes, all of which were scraped once; files go below `folder`."""
    node_port, alertmanager_port, prometheus_port = free_port(), free_port(), free_port()
    pagers = Pagers()
    routes = (DEPLOY / "alertmanager/alertmanager.yml").read_text()
    (folder / "alertmanager.yml").write_text(routes.replace(":9780/", f":{pagers.server_address[1]}/"))
    config = folder / "prometheus.yml"
    config.write_text(_config(nodes, folder, node_port, alertmanager_port, prometheus_port))
    node_server = [sys.executable, "-m", "tests.fleet.node_server", str(node_port), str(nodes), profile]
    alertmanager = [
        tool("prometheus-alertmanager", "prometheus-alertmanager"),
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{alertmanager_port}",
        "--cluster.listen-address=",
    ]
    prometheus = [
        tool("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{prometheus_port}",
        f"--query.timeout={ANSWER_SECONDS:.0f}s",
    ]
    with ExitStack() as stack:
        stack.enter_context(serving(pagers))
        stack.enter_context(running(node_server, folder / "nodes.log"))
        stack.enter_context(running(alertmanager, folder / "alertmanager.log"))
        process = stack.enter_context(running(prometheus, folder / "prometheus.log"))
        url = answering(f"http://127.0.0.1:{prometheus_port}", "Prometheus")
        servers = Stack(nodes, pagers, url, process.pid, node_port)
        scraped = "count(railscope_build_info)"
        until(lambda: [value for _, value in servers.query(scraped)] == [nodes], "a scrape of every node", 300)
        yield servers


def _config(nodes: int, folder: Path, node_port: int, alertmanager_port: int, prometheus_port: int) -> str:
    targets = [
        {
            "targets": [f"127.0.0.1:{node_port}"],
            "labels": {"instance": instance(at), "__metrics_path__": f"/node/{at}"},
        }
        for at in range(nodes)
    ]
    (folder / "targets.json").write_text(json.dumps(targets))
    rules = "".join(f"  - {file}\n" for file in LOADED)
    every = f"{INTERVAL_SECONDS}s"
    return (
        f"global:\n  scrape_interval: {every}\n  evaluation_interval: {every}\n"
        f"rule_files:\n{rules}"
        f"alerting:\n  alertmanagers:\n    - static_configs:\n        - targets: ['127.0.0.1:{alertmanager_port}']\n"
        "scrape_configs:\n"
        f"  - job_name: railscope\n    file_sd_configs:\n      - files: [{folder}/targets.json]\n"
        f"  - job_name: prometheus\n    static_configs:\n      - targets: ['127.0.0.1:{prometheus_port}']\n"
    )


def instance(node: int) -> str:
    """What Prometheus calls a node."""
    return f"node{node:04d}"
