"""One fleet behind a real Prometheus and Alertmanager: rules' times, pages, verdicts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from railscope.dashboards import rules_files
from tests.faults.cluster import RAILSCOPE, until
from tests.fleet.simulation import Fault
from tests.serving import QuietHandler
from tests.serving import running as serving
from tests.stack.prometheus import answering, free_port, running, tool
from tests.stack.stack import DEPLOY

_INTERVAL_SECONDS: Final = 15
_WARM_SECONDS: Final = 75.0
"""Until rates over a minute are known of all nodes."""
_FAULT_SECONDS: Final = 100.0
"""Scrape, evaluation, the alerts' own wait and Alertmanager's."""
_MENDED_SECONDS: Final = 60.0
_DIAGNOSE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Page:
    """One notification of the person on call."""

    alerts: tuple[str, ...]
    """Names of those that fire."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What one fault came to in a fleet of one size."""

    nodes: int
    fault: str
    group_seconds: dict[str, float]
    """The longest evaluation of each group of rules while the fault lasted."""
    cpu_seconds: float
    """What Prometheus took for a second of time, scrapes and all."""
    missed: int
    """Evaluations that Prometheus left out, because the one before was not over."""
    resident_bytes: int
    pages: tuple[Page, ...]
    headline: str
    """Of `railscope diagnose`."""
    causes: int
    """Root causes that it tells of."""
    diagnose_seconds: float
    diagnose_status: int
    said: tuple[str, ...] = field(default=())

    @property
    def rules_seconds(self) -> float:
        return sum(self.group_seconds.values())


class _Pager(QuietHandler):
    server: _Pagers

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, "text/plain", b"")
        facts = json.loads(body)
        firing = tuple(one["labels"]["alertname"] for one in facts["alerts"] if one["status"] == "firing")
        if firing and self.path.endswith("/on-call"):
            self.server.pages.append(Page(tuple(sorted(set(firing))), len(body)))


class _Pagers(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Pager)
        self.pages: list[Page] = []


class _Stack:
    """The servers around a fleet."""

    def __init__(self, nodes: int, prometheus_url: str, process: subprocess.Popen[bytes], port: int) -> None:
        self.nodes, self.url = nodes, prometheus_url
        self._process, self._port = process, port

    def break_by(self, fault: Fault) -> None:
        urllib.request.urlopen(f"http://127.0.0.1:{self._port}/break/{fault}", timeout=10).close()

    def query(self, expression: str) -> list[float]:
        return [float(one["value"][1]) for one in self._api(f"query?query={quote(expression)}")["result"]]

    def groups(self) -> dict[str, float]:
        """The last evaluation of each group of rules, seconds."""
        return {one["name"]: one["evaluationTime"] for one in self._api("rules")["groups"]}

    def cpu_seconds(self) -> float:
        """User and system time of Prometheus so far: proc(5)."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    def _api(self, what: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{what}", timeout=120) as answer:
            return json.load(answer)["data"]


def measure(nodes: int, faults: Sequence[Fault], folder: Path, profile: str) -> Iterator[Measured]:
    """Let these faults happen one after the other, each to a fleet that was well for a while."""
    with ExitStack() as stack:
        pagers = _Pagers()
        stack.enter_context(serving(pagers))
        servers = stack.enter_context(_servers(nodes, folder, pagers.server_address[1], profile))
        until(lambda: servers.query("count(railscope_build_info)") == [nodes], "a scrape of every node", 120)
        time.sleep(_WARM_SECONDS)
        for fault in faults:
            yield _measure(servers, fault, pagers)
            servers.break_by(Fault.NONE)
            time.sleep(_MENDED_SECONDS)


def _measure(servers: _Stack, fault: Fault, pagers: _Pagers) -> Measured:
    pagers.pages.clear()
    cpu_seconds, began = servers.cpu_seconds(), time.monotonic()
    missed = sum(servers.query("prometheus_rule_group_iterations_missed_total"))
    longest: dict[str, float] = {}
    servers.break_by(fault)
    while time.monotonic() - began < _FAULT_SECONDS:
        for name, seconds in servers.groups().items():
            longest[name] = max(longest.get(name, 0.0), seconds)
        time.sleep(_INTERVAL_SECONDS / 3)
    passed, took = time.monotonic() - began, servers.cpu_seconds() - cpu_seconds
    asked = time.monotonic()
    command = [str(RAILSCOPE), "diagnose", "--prometheus", servers.url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DIAGNOSE_SECONDS, check=False)
    seconds = time.monotonic() - asked
    said = done.stdout or json.dumps({"headline": done.stderr.strip(), "findings": []})
    facts = json.loads(said)
    return Measured(
        nodes=servers.nodes,
        fault=fault.value,
        group_seconds=longest,
        cpu_seconds=took / passed,
        missed=int(sum(servers.query("prometheus_rule_group_iterations_missed_total")) - missed),
        resident_bytes=servers.resident_bytes(),
        pages=tuple(pagers.pages),
        headline=facts["headline"],
        causes=len(facts["findings"]),
        diagnose_seconds=seconds,
        diagnose_status=done.returncode,
        said=tuple(one["headline"] for one in facts["findings"]),
    )


@contextmanager
def _servers(nodes: int, folder: Path, pager_port: int, profile: str) -> Iterator[_Stack]:
    node_port, alertmanager_port, prometheus_port = free_port(), free_port(), free_port()
    routes = (DEPLOY / "alertmanager/alertmanager.yml").read_text().replace(":9780/", f":{pager_port}/")
    (folder / "alertmanager.yml").write_text(routes)
    targets = [
        {
            "targets": [f"127.0.0.1:{node_port}"],
            "labels": {"instance": f"node{at:04d}", "__metrics_path__": f"/node/{at}"},
        }
        for at in range(nodes)
    ]
    (folder / "targets.json").write_text(json.dumps(targets))
    rules = "".join(f"  - {file}\n" for file in sorted(rules_files.SHIPPED.glob("*.yml")))
    (folder / "prometheus.yml").write_text(
        f"global:\n  scrape_interval: {_INTERVAL_SECONDS}s\n  evaluation_interval: {_INTERVAL_SECONDS}s\n"
        f"rule_files:\n{rules}"
        f"alerting:\n  alertmanagers:\n    - static_configs:\n        - targets: ['127.0.0.1:{alertmanager_port}']\n"
        "scrape_configs:\n"
        f"  - job_name: railscope\n    file_sd_configs:\n      - files: [{folder}/targets.json]\n"
        f"  - job_name: prometheus\n    static_configs:\n      - targets: ['127.0.0.1:{prometheus_port}']\n"
    )
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
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{prometheus_port}",
    ]
    with ExitStack() as stack:
        stack.enter_context(running(node_server, folder / "nodes.log"))
        stack.enter_context(running(alertmanager, folder / "alertmanager.log"))
        process = stack.enter_context(running(prometheus, folder / "prometheus.log"))
        yield _Stack(nodes, answering(f"http://127.0.0.1:{prometheus_port}", "Prometheus"), process, node_port)


def table(measured: Sequence[Measured]) -> str:
    """One line a fault and fleet."""
    rows = [
        (
            "nodes",
            "fault",
            "rules",
            "slowest group",
            "CPU",
            "memory",
            "missed",
            "pages",
            "largest",
            "diagnose",
            "causes",
            "headline",
        )
    ]
    for one in measured:
        slowest = max(one.group_seconds, key=lambda name: one.group_seconds[name])
        rows.append(
            (
                str(one.nodes),
                one.fault,
                f"{one.rules_seconds:.2f} s",
                f"{slowest} {one.group_seconds[slowest]:.2f} s",
                f"{one.cpu_seconds:.2f}",
                f"{one.resident_bytes / 2**30:.1f} GiB",
                str(one.missed),
                str(len(one.pages)),
                f"{max((page.size_bytes for page in one.pages), default=0) / 1000:.1f} kB",
                f"{one.diagnose_seconds:.1f} s",
                str(one.causes),
                one.headline,
            )
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    return "\n".join([*lines, *_exponents(measured)])


def _exponents(measured: Sequence[Measured]) -> Iterator[str]:
    """How the time of all rules grows from the smallest fleet to the largest, by fault."""
    for fault in dict.fromkeys(one.fault for one in measured):
        by_nodes = {one.nodes: one.rules_seconds for one in measured if one.fault == fault}
        least, most = min(by_nodes), max(by_nodes)
        if most > least:
            exponent = math.log(by_nodes[most] / by_nodes[least]) / math.log(most / least)
            yield f"rules, {fault}: exponent {exponent:.2f} from {least} to {most} nodes"


def write_json(path: Path, measured: Sequence[Measured]) -> None:
    """Everything, for comparison with other runs."""
    path.write_text(json.dumps([asdict(one) for one in measured], indent=1) + "\n")
