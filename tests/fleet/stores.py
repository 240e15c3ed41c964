"""`python -m tests.fleet.stores`: what simulated fleets take of a Prometheus, and of a VictoriaMetrics with vmalert.

Both scrape the same nodes, first without the shipped rules, then with them.  The table has memory and CPU time by
number of nodes, and the exponents with which they grow, which are what `railscope dashboards cost` reckons with
(dashboards/fleet_cost.py).  Nothing breaks meanwhile.  CPU time is the processes' own, so the machine may be busy, as
long as no scrape is late.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from railscope.exporters.series.lean import FULL, PROFILES
from tests.fleet.rule_cost import LOADED
from tests.stack.prometheus import answering, free_port, running, store_at, tool, until

_INTERVAL_SECONDS: Final = 15
_WARM_SECONDS: Final = 60.0
_MEASURED_SECONDS: Final = 60.0
_PACKAGE: Final = "victoria-metrics"


@dataclass(frozen=True, slots=True)
class Taken:
    """What one server takes of one fleet."""

    server: str
    nodes: int
    series: int
    resident_bytes: int
    """With rules, at the end."""
    scrape_cpu: float
    """CPU seconds a second without rules."""
    rules_cpu: float
    """What the rules add."""


def _cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _resident_bytes(process: subprocess.Popen[bytes]) -> int:
    return int(Path(f"/proc/{process.pid}/status").read_text().split("VmRSS:")[1].split()[0]) << 10


def _rates(servers: Sequence[Sequence[subprocess.Popen[bytes]]]) -> list[float]:
    """CPU seconds a second of each server's processes, over a while."""
    before, began = [sum(map(_cpu_seconds, one)) for one in servers], time.monotonic()
    time.sleep(_MEASURED_SECONDS)
    passed = time.monotonic() - began
    return [(sum(map(_cpu_seconds, one)) - was) / passed for one, was in zip(servers, before, strict=True)]


def measure(nodes: int, profile: str, folder: Path) -> list[Taken]:
    """What both servers take of a fleet of so many nodes."""
    node_port, prometheus_port, metrics_port = free_port(), free_port(), free_port()
    targets = [
        {
            "targets": [f"127.0.0.1:{node_port}"],
            "labels": {"instance": f"node{at:04d}", "__metrics_path__": f"/node/{at}"},
        }
        for at in range(nodes)
    ]
    (folder / "targets.json").write_text(json.dumps(targets))
    interval = f"{_INTERVAL_SECONDS}s"
    scrapes = (
        f"scrape_configs:\n  - job_name: railscope\n    file_sd_configs:\n      - files: [{folder}/targets.json]\n"
    )
    config, rules = folder / "prometheus.yml", LOADED
    every = f"global: {{scrape_interval: {interval}, evaluation_interval: {interval}}}\n"
    config.write_text(every + scrapes)
    (folder / "scrape.yml").write_text(f"global: {{scrape_interval: {interval}}}\n{scrapes}")
    with ExitStack() as stack:

        def start(name: str, *command: str) -> subprocess.Popen[bytes]:
            return stack.enter_context(running(command, folder / f"{name}.log"))

        start("nodes", sys.executable, "-m", "tests.fleet.node_server", str(node_port), str(nodes), profile)
        prometheus = start(
            "prometheus",
            tool("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{prometheus_port}",
        )
        victoria = start(
            "victoria",
            tool("victoria-metrics", _PACKAGE),
            f"-storageDataPath={folder / 'victoria'}",
            f"-httpListenAddr=127.0.0.1:{metrics_port}",
            f"-promscrape.config={folder / 'scrape.yml'}",
        )
        url = answering(f"http://127.0.0.1:{prometheus_port}", "Prometheus")
        victoria_url = answering(f"http://127.0.0.1:{metrics_port}", "VictoriaMetrics")
        store = store_at(url)
        until(lambda: [one.value for one in store.query("sum(up)")] == [nodes], "a scrape of every node", 300)
        time.sleep(_WARM_SECONDS)
        without = _rates([[prometheus], [victoria]])
        config.write_text(f"{every}rule_files: [{', '.join(map(str, rules))}]\n{scrapes}")
        prometheus.send_signal(signal.SIGHUP)
        vmalert = start(
            "vmalert",
            tool("vmalert", _PACKAGE),
            f"-datasource.url={victoria_url}",
            f"-remoteWrite.url={victoria_url}",
            "-notifier.url=http://127.0.0.1:9",
            f"-evaluationInterval={interval}",
            f"-httpListenAddr=127.0.0.1:{free_port()}",
            *(f"-rule={file}" for file in rules),
        )
        time.sleep(_WARM_SECONDS)
        with_rules = _rates([[prometheus], [victoria, vmalert]])
        assert [one.value for one in store.query("sum(up)")] == [nodes], "a scrape was late: the machine is too busy"
        series = int(store.query('count({__name__=~".+"})')[0].value)
        return [
            Taken("Prometheus", nodes, series, _resident_bytes(prometheus), without[0], with_rules[0] - without[0]),
            Taken(
                "VictoriaMetrics",
                nodes,
                series,
                _resident_bytes(victoria) + _resident_bytes(vmalert),
                without[1],
                with_rules[1] - without[1],
            ),
        ]


def describe(taken: Sequence[Taken]) -> str:
    """One line a server and fleet, then how it grows from the smallest to the largest."""
    lines = []
    for one in taken:
        lines.append(
            f"{one.server:<15} {one.nodes:>5} nodes {one.series:>9,} series: {one.resident_bytes / 1e6:>7,.0f} MB, "
            f"scrapes {one.scrape_cpu:.3f}, rules {one.rules_cpu:.3f} CPU s a second"
        )
    for server in dict.fromkeys(one.server for one in taken):
        of = [one for one in taken if one.server == server]
        least, most = min(of, key=lambda one: one.nodes), max(of, key=lambda one: one.nodes)
        if most.nodes > least.nodes:
            many = math.log(most.nodes / least.nodes)
            scrapes, rules = (
                math.log(last / first) / many if first > 0 and last > 0 else math.nan
                for first, last in ((least.scrape_cpu, most.scrape_cpu), (least.rules_cpu, most.rules_cpu))
            )
            per_series = (most.resident_bytes - least.resident_bytes) / (most.series - least.series)
            lines.append(f"{server}: {per_series:,.0f} bytes a series, exponents {scrapes:.2f} and {rules:.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet.stores", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 128], metavar="N")
    parser.add_argument("--profile", choices=PROFILES, default=FULL, help="of what the agents show")
    parser.add_argument("--json", type=Path, default=Path("fleet-stores.json"), metavar="PATH")
    options = parser.parse_args()
    taken: list[Taken] = []
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory(prefix="railscope-stores-") as folder:
            taken += measure(nodes, options.profile, Path(folder))
        options.json.write_text(json.dumps([asdict(one) for one in taken], indent=1) + "\n")
        print(describe(taken[-2:]), flush=True)
    print(f"\n{describe(taken)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
