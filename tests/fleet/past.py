"""A simulated fleet's last minutes as blocks of a real Prometheus: all of it is there at once, nothing is waited for.

promtool makes the blocks (create-blocks-from openmetrics), of what agents would have shown at each scrape; the server
then scrapes nothing, so that what a question costs is its own.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from railscope.dashboards import rules_files
from tests.faults.cluster import RAILSCOPE
from tests.fleet.server import Server
from tests.fleet.simulation import Fault, Fleet
from tests.stack.prometheus import answering, free_port, running, tool

END: Final = 1_795_003_400.0
"""When the last scrape was, seconds since the Unix epoch: well within a block of two hours."""
_SCRAPE_SECONDS: Final = 15.0
_FAULT_SECONDS: Final = 90.0
_RAN_BEFORE_SECONDS: Final = 1800.0


class Past(Server):
    """A server that holds a fleet's last minutes."""

    def diagnose(self) -> dict[str, Any]:
        """What `railscope diagnose --json` says at the end."""
        command = [str(RAILSCOPE), "diagnose", "--prometheus", self.url, "--time", f"{END:.3f}", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@contextmanager
def past(
    folder: Path, fleet: Fleet, fault: Fault, *, seconds: float = 360.0, passes_of_rules: int = 0
) -> Iterator[Past]:
    """Serve the last minutes of a fleet, in which the fault was there for the last one and a half.

    Args:
        folder: is made, and takes the blocks.
        fleet: began at `began()`.
        fault: what is broken.
        seconds: for how long hosts were scraped.
        passes_of_rules: how often the shipped rules are evaluated over the last two intervals: once for those that ask
            what hosts show, once more for those that ask what others record.
    """
    folder.mkdir(parents=True)
    text, blocks = folder / "past.txt", folder / "blocks"
    with text.open("wb") as out:
        for line in _scrapes(fleet, fault, seconds):
            out.write(line)
    _make_blocks("openmetrics", str(text), str(blocks))
    text.unlink()
    for _ in range(passes_of_rules):
        with _served(folder, blocks) as server:
            when = [
                f"--start={END - _SCRAPE_SECONDS:.0f}",
                f"--end={END:.0f}",
                f"--eval-interval={_SCRAPE_SECONDS:.0f}s",
            ]
            rules = str(rules_files.SHIPPED / rules_files.RECORDING)
            _make_blocks("rules", f"--url={server.url}", *when, f"--output-dir={folder / 'recorded'}", rules)
        for block in (folder / "recorded").iterdir():
            block.rename(blocks / block.name)
    with _served(folder, blocks) as server:
        yield server


def _make_blocks(source: str, *arguments: str) -> None:
    command = [tool("promtool"), "tsdb", "create-blocks-from", source, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@contextmanager
def _served(folder: Path, blocks: Path) -> Iterator[Past]:
    config = folder / "prometheus.yml"
    config.write_text("global: {scrape_interval: 15s}\n")
    port = free_port()
    command = [
        tool("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={blocks}",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address=127.0.0.1:{port}",
        "--web.enable-remote-write-receiver",
    ]
    with running(command, folder / "prometheus.log") as process:
        yield Past(answering(f"http://127.0.0.1:{port}", "Prometheus"), process.pid)


def began() -> float:
    """When the jobs of such a fleet began, seconds since the Unix epoch."""
    return END - _RAN_BEFORE_SECONDS


def _scrapes(fleet: Fleet, fault: Fault, seconds: float) -> Iterator[bytes]:
    """Every sample, in OpenMetrics: hosts are scraped one after the other within each interval."""
    prefixes: dict[tuple[int, bytes], bytes] = {}
    broken = False
    for number in range(int(seconds / _SCRAPE_SECONDS), -1, -1):
        until = END - number * _SCRAPE_SECONDS
        if not broken and until >= END - _FAULT_SECONDS:
            fleet.break_by(fault, END - _FAULT_SECONDS)
            broken = True
        for node in range(fleet.nodes):
            at = until - _SCRAPE_SECONDS * (1 - (node + 1) / fleet.nodes)
            target = b'instance="node%04d:9779",job="railscope"' % node
            end = b" %.3f\n" % at
            answers = node not in fleet.silent
            yield b"up{%s} %d%s" % (target, answers, end)
            for line in fleet.text(node, at).splitlines() if answers else ():
                if line.startswith(b"#"):
                    continue
                series, _, value = line.rpartition(b" ")
                prefix = prefixes.get((node, series))
                if prefix is None:
                    name, brace, labels = series.partition(b"{")
                    labels = (b"," + labels.replace(b',job="', b',exported_job="')) if brace else b"}"
                    prefix = prefixes[node, series] = name + b"{" + target + labels + b" "
                yield prefix + value + end
    yield b"# EOF\n"
