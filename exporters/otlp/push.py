"""Has the metrics pushed at intervals: a thread of the agent that hands exports to the sending process (sender.py).

The agent's loop has no part in it.  The thread takes the same families as a scrape, packs them one by one, giving up
the interpreter lock in between, and writes them to the process, which may have ended: then another one is started at
the next interval.  What the process reports is counted, and shown as the collector `otlp`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from railscope.agent.facts.snapshot import CollectorResult, Snapshot
from railscope.exporters.otlp.wire import LENGTH, Export, Report, SenderSettings, parse_report
from railscope.exporters.series.family import Family

_log = logging.getLogger("railscope.otlp")

COLLECTOR: Final = "otlp"
"""What `collector_success` calls it."""
_LIBRARY: Final = "opentelemetry.exporter.otlp.proto.http"
_END_SECONDS: Final = 2.0
_LONGEST_REPORT: Final = 1 << 16
_SHOWN: Final = 80
"""Bytes of what is no report that the log has."""


def library_is_there() -> bool:
    """Whether OpenTelemetry's exporter is installed; it is not imported."""
    try:
        return importlib.util.find_spec(_LIBRARY) is not None
    except ModuleNotFoundError:
        return False


def read_boot_seconds(procfs: Path) -> int:
    """When this host booted, in seconds since the Unix epoch; 0: not known, which OTLP takes for that.

    Source: proc(5), /proc/stat.
    """
    try:
        text = (procfs / "stat").read_text()
    except OSError:
        return 0
    found = re.search(r"^btime ([0-9]{1,18})$", text, re.MULTILINE)
    return int(found[1]) if found else 0


@dataclass(frozen=True, slots=True)
class PushResults:
    """What came of the exports so far."""

    collector: CollectorResult | None
    """Of the last attempt; None: there was none yet."""
    exports: Mapping[str, int]
    """By result."""


class OtlpPush:
    """Pushes from `start` until `close`."""

    def __init__(
        self,
        settings: SenderSettings,
        interval_seconds: float,
        families: Callable[[Callable[[Family], object]], Snapshot],
        *,
        totals_are_kept: bool,
        boot_realtime_ns: int,
        in_kubernetes: bool,
    ) -> None:
        """`families` gives each family to its argument, and returns the snapshot that they are of; it is called on the
        thread.  `totals_are_kept`: totals go on from an earlier agent's of this boot."""
        self._settings = settings
        self._interval_seconds = interval_seconds
        self._families = families
        self._totals_are_kept = totals_are_kept
        self._boot_realtime_ns = boot_realtime_ns
        self._in_kubernetes = in_kubernetes
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("success", "failure", "dropped"), 0)
        self._last: CollectorResult | None = None
        self._told: set[str] = set()
        """What went wrong since the last success, and was logged."""
        self._process: subprocess.Popen[bytes] | None = None
        self._lost: subprocess.Popen[bytes] | None = None
        """The last one that ended by itself, or was ended for what it wrote."""
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> None:
        """Begin; the first export goes at once."""
        self._thread.start()

    def results(self) -> PushResults:
        """What came of it so far; from any thread."""
        with self._lock:
            return PushResults(self._last, dict(self._counts))

    def close(self) -> None:
        """Push no more; an export that is under way is lost."""
        self._ending.set()
        process = self._process
        if process is not None:
            process.kill()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._ending.wait(max(0.0, due - time.monotonic())):
            # What took longer than an interval is not made up for.
            due = max(due + self._interval_seconds, time.monotonic())
            try:
                self._push()
            except OSError as error:
                process = self._process
                if process is None:
                    self._take(Report("failure", error=f"no sending process can be started ({error.strerror})"))
                else:
                    self._lose(process, f"the sending process has ended ({error.strerror})")
                self._end_process()
            # Whatever it is: what this thread did not survive would end all exports without a word.
            except Exception as error:  # noqa: BLE001
                if not self._told:
                    _log.error("an export cannot be made", exc_info=error)
                self._take(Report("failure", error=f"an export cannot be made ({type(error).__name__})"))
        self._end_process()

    def _lose(self, process: subprocess.Popen[bytes], why: str) -> None:
        """End a sending process that is of no use any more; that it is so is reported once, empty: it said why itself.

        The next export takes another one.
        """
        with self._lock:
            first, self._lost = self._lost is not process, process
        if first and why and not self._ending.is_set():
            self._take(Report("failure", error=why))
        process.kill()

    def _push(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._end_process()
            self._process = self._start_process()
        assert self._process.stdin is not None
        packed = self._pack()
        self._process.stdin.write(LENGTH.pack(len(packed)))
        self._process.stdin.write(packed)
        self._process.stdin.flush()

    def _pack(self) -> bytes:
        packed: list[bytes] = []
        snapshot = self._families(lambda family: packed.append(pickle.dumps(family)))
        start_ns = self._boot_realtime_ns if self._totals_are_kept else snapshot.health.started_realtime_ns
        return pickle.dumps(
            Export(
                realtime_ns=snapshot.realtime_ns,
                start_realtime_ns=start_ns,
                boot_realtime_ns=self._boot_realtime_ns,
                version=snapshot.version,
                resource=self._resource(snapshot),
                packed=tuple(packed),
            )
        )

    def _start_process(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-m", "railscope.exporters.otlp.sender", json.dumps(asdict(self._settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            # Ctrl-C is for the agent.
            process_group=0,
        )
        threading.Thread(target=self._listen, args=(process,), name="otlp-reports", daemon=True).start()
        return process

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        process.wait()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Take what a sending process reports, until it ends; one that writes anything else is ended."""
        assert process.stdout is not None
        report: Report | None = None
        with process.stdout as lines:
            while line := lines.readline(_LONGEST_REPORT):
                report = parse_report(line)
                if report is None:
                    self._lose(process, f"the sending process wrote {line[:_SHOWN]!r}, which is no report")
                    return
                self._take(report)
        said_why = report is not None and report.result == "failure"
        self._lose(process, "" if said_why else f"the sending process has ended (exit status {process.wait()})")

    def _take(self, report: Report) -> None:
        with self._lock:
            self._counts[report.result] += 1
            if report.result != "dropped":
                self._last = CollectorResult(COLLECTOR, report.result == "success", report.seconds)
            told = report.result in self._told
            again = report.result == "success" and bool(self._told)
            self._told = set() if report.result == "success" else self._told | {report.result}
        # Once while it lasts, and not at each interval.
        if again:
            _log.info("%s takes exports again", self._settings.endpoint)
        elif report.result == "dropped" and not told:
            _log.warning("an export to %s was given up: %s; others may follow", self._settings.endpoint, report.error)
        elif report.result == "failure" and not told:
            _log.warning("%s: %s; it is tried again at each interval", self._settings.endpoint, report.error)

    def _resource(self, snapshot: Snapshot) -> dict[str, str]:
        """What OpenTelemetry's conventions call this host and this agent."""
        node = snapshot.node
        known = {
            "service.name": "railscope",
            "service.version": snapshot.version,
            "service.instance.id": node.name or node.hostname,
            "host.name": node.hostname or node.name,
            "os.type": "linux",
            "k8s.node.name": node.name if self._in_kubernetes else "",
            "k8s.cluster.name" if self._in_kubernetes else "railscope.cluster": node.cluster,
        }
        return {name: value for name, value in known.items() if value}
