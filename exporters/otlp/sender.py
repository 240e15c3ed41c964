"""The process that pushes: takes exports from the agent, and sends them by OpenTelemetry's exporter, oldest first.

    python -m railscope.exporters.otlp.sender SETTINGS

A process of its own, because the exporter, its HTTP client and protobuf are 30 MB of code and work without a pause,
and because what talks to the network need not have the agent's rights: it gives them all up when it has read the
headers.  The agent writes exports to its standard input, each behind its length; it writes a line of JSON for each
attempt to its standard output.

An export that fails stays, and is tried again when the next one comes.  It is given up when five attempts have failed,
since a server may refuse one for what is in it, or when those that wait are too many; the newest is always kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import pickle
import signal
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from railscope.exporters.otlp.wire import LENGTH, Report, SenderSettings

MOST_ATTEMPTS: Final = 5
MOST_WAITING: Final = 16
MOST_WAITING_BYTES: Final = 32 << 20
LONGEST_EXPORT_BYTES: Final = 256 << 20
_LONGEST_ERROR: Final = 300
_PR_SET_PDEATHSIG: Final = 1
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
_CAPABILITY_VERSION: Final = 0x20080522
_NICENESS: Final = 10


@dataclass(slots=True)
class _Waiting:
    packed: bytes
    failed: int = 0


class Sender:
    """Exports that wait, and the loop that sends them.  `offer` and `end` are for another thread than `run`."""

    def __init__(self, send: Callable[[bytes], Report], report: Callable[[Report], None]) -> None:
        """`send` makes one attempt; `report` is told of each, and of each export that is given up."""
        self._send = send
        self._report = report
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._news = False
        self._ended = False

    def offer(self, packed: bytes) -> None:
        """One more export; the oldest are given up where too many wait."""
        given_up = 0
        with self._changed:
            self._waiting.append(_Waiting(packed))
            while len(self._waiting) > 1 and (
                len(self._waiting) > MOST_WAITING or sum(len(one.packed) for one in self._waiting) > MOST_WAITING_BYTES
            ):
                self._waiting.popleft()
                given_up += 1
            self._news = True
            self._changed.notify()
        for _ in range(given_up):
            self._report(Report("dropped", error=f"more than {MOST_WAITING} wait"))

    def end(self) -> None:
        """Let `run` return."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def run(self) -> None:
        """Send until `end`: all that waits whenever something comes, until one fails."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._news)
                if self._ended:
                    return
                self._news = False
            while (oldest := self._oldest()) is not None and self._attempt(oldest):
                pass

    def _oldest(self) -> _Waiting | None:
        with self._changed:
            return self._waiting[0] if self._waiting and not self._ended else None

    def _attempt(self, one: _Waiting) -> bool:
        """Try to send one; whether the next may be tried."""
        report = self._send(one.packed)
        self._report(report)
        done = report.result == "success"
        if not done:
            one.failed += 1
            if one.failed < MOST_ATTEMPTS:
                return False
            self._report(Report("dropped", error=f"{MOST_ATTEMPTS} attempts failed: {report.error}"))
        with self._changed, contextlib.suppress(ValueError):  # it was given up meanwhile
            self._waiting.remove(one)
        return done


class _FirstError(logging.Handler):
    """Keeps the first line that the exporter logs of an attempt: the reason, where the last says that time was up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or " ".join(record.getMessage().split())[:_LONGEST_ERROR]


def read_headers(file: Path) -> dict[str, str]:
    """The headers of a file: lines `Name: value`, `#` begins a comment.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is no header; the message does not repeat it, since it may be secret.
    """
    headers = {}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not name.strip().isascii():
            raise ValueError(f"{file}: line {number} is no header: write 'Name: value'")
        headers[name.strip().lower()] = value.strip()
    return headers


def make_send(settings: SenderSettings, headers: dict[str, str] | None) -> Callable[[bytes], Report]:
    """What sends one export, by OpenTelemetry's exporter.

    Call it with the rights that the exports are sent with: the HTTP client reads certificates and key at each
    connection, and its errors name no file.

    Raises:
        OSError: a certificate or the key cannot be read.
    """
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import MetricExportResult

    from railscope.exporters.otlp.messages import count_points, to_metrics_data

    for file in (settings.ca_file, settings.certificate_file, settings.key_file):
        if file:
            Path(file).read_bytes()
    if settings.ca_file:
        # To the HTTP client they would go before the file.
        for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
            os.environ.pop(variable, None)
    errors = _FirstError()
    log = logging.getLogger("opentelemetry")
    log.addHandler(errors)
    log.propagate = False
    exporter: Any = OTLPMetricExporter(
        endpoint=settings.endpoint,
        certificate_file=settings.ca_file or None,
        client_certificate_file=settings.certificate_file or None,
        client_key_file=settings.key_file or None,
        headers=headers,
        timeout=settings.timeout_seconds,
        compression=Compression.Gzip,
    )

    def send(packed: bytes) -> Report:
        began = time.monotonic()
        errors.text = ""
        points = 0
        try:
            data = to_metrics_data(pickle.loads(packed))
            points = count_points(data)
            done = exporter.export(data) is MetricExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001  # whatever the exporter raises ends an attempt, never the process
            done, errors.text = False, f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_ERROR]}"
        seconds = time.monotonic() - began
        if done:
            return Report("success", seconds, points)
        return Report("failure", seconds, points, errors.text or "the endpoint did not take it")

    return send


def read_exact(stream: BinaryIO, length: int) -> bytes | None:
    """So many bytes; None: the stream ends before."""
    read = stream.read(length)
    return read if len(read) == length else None


def main(arguments: list[str]) -> int:
    """Send until standard input ends."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = SenderSettings(**json.loads(arguments[0]))
    told = threading.Lock()
    # What a library prints is no report: it goes where the agent's log goes.
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(one: Report) -> None:
        with told:
            reports.write(json.dumps(asdict(one)) + "\n")
            reports.flush()

    try:
        # Before the rights go: the file of headers may be root's alone.
        headers = read_headers(Path(settings.headers_file)) if settings.headers_file else None
        _give_up_rights(libc)
        send = make_send(settings, headers)
    except (OSError, ValueError) as error:
        report(Report("failure", error=f"{error}"))
        return 2
    sender = Sender(send, report)

    def take() -> None:
        stream = sys.stdin.buffer
        while (length := read_exact(stream, LENGTH.size)) is not None:
            (size,) = LENGTH.unpack(length)
            packed = read_exact(stream, size) if size <= LONGEST_EXPORT_BYTES else None
            if packed is None:
                break
            sender.offer(packed)
        sender.end()

    threading.Thread(target=take, name="take", daemon=True).start()
    sender.run()
    # A request may be under way, and its thread's reading too: there is nothing to wait for.
    os._exit(0)


def _give_up_rights(libc: ctypes.CDLL) -> None:
    """Every capability, for good; the kernel refuses none of that."""
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    libc.capset(struct.pack("<Ii", _CAPABILITY_VERSION, 0), bytes(24))
    os.nice(_NICENESS)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
