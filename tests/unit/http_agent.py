"""A metrics server on the loopback for tests, with somebody behind it, and the clients that ask it."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Final

from railscope.agent.facts.snapshot import Snapshot
from railscope.exporters.web.http import MetricsServer, ServerSettings
from tests.unit.exporters_snapshots import full_snapshot

FREE_PORT: Final = ServerSettings(listen_address="127.0.0.1:0", request_timeout_seconds=5.0)
PROMETHEUS_2: Final = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""What it accepts."""
PROTOBUF: Final = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily"
PROMETHEUS_NATIVE: Final = (
    f"{PROTOBUF};encoding=delimited,application/openmetrics-text;version=1.0.0;q=0.8,"
    "application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""With --enable-feature=native-histograms."""


@dataclass
class Agent:
    """What stands behind the server; a test changes its mood."""

    snapshot: Callable[[], Snapshot] = full_snapshot
    health: tuple[bool, str] = (True, "ok")
    readiness: tuple[bool, str] = (True, "ready")
    servers: ExitStack = field(default_factory=ExitStack)

    def server(self, settings: ServerSettings = FREE_PORT) -> MetricsServer:
        return self.servers.enter_context(
            MetricsServer(
                settings,
                snapshot=lambda: self.snapshot(),
                healthy=lambda: self.health,
                ready=lambda: self.readiness,
            )
        )


@contextmanager
def serving() -> Iterator[Agent]:
    """Somebody to start servers of, closed at the end."""
    one = Agent()
    with one.servers:
        yield one


@dataclass(frozen=True)
class Response:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(server: MetricsServer, path: str, method: str = "GET", **headers: str) -> Response:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as client:
        return ask_on(client, path, method, **headers)


def ask_on(client: http.client.HTTPConnection, path: str, method: str = "GET", **headers: str) -> Response:
    client.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = client.getresponse()
    return Response(answer.status, answer.headers, answer.read())


def raw(server: MetricsServer, data: bytes) -> bytes:
    """Everything that the server says to some bytes until it closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(data)
        said = b""
        while more := client.recv(65536):
            said += more
        return said


def received_until_closed(client: socket.socket) -> bytes:
    said = b""
    try:
        while more := client.recv(65536):
            said += more
    except ConnectionResetError:
        pass
    return said
