"""Where Alertmanager delivers: an HTTP server that keeps every notification.

Source: https://prometheus.io/docs/alerting/latest/configuration/#webhook_config, version 4.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from railscope.testbed.namespaces import tcp_socket
from tests.serving import QuietHandler, running

FIRING: Final = "firing"
RESOLVED: Final = "resolved"


@dataclass(frozen=True, slots=True)
class Notified:
    """One alert of a notification."""

    receiver: str
    status: str
    """`firing` or `resolved`."""
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    group: Mapping[str, str]
    """The labels that its notification was grouped by."""

    @property
    def name(self) -> str:
        return self.labels["alertname"]


def notified_in(body: bytes) -> list[Notified]:
    """The alerts of one notification."""
    facts: dict[str, Any] = json.loads(body)
    assert facts["version"] == "4"
    return [
        Notified(facts["receiver"], one["status"], one["labels"], one["annotations"], facts["groupLabels"])
        for one in facts["alerts"]
    ]


class _Handler(QuietHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, "text/plain", b"")
        self.server.webhook.take(notified_in(body))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    webhook: Webhook


class Webhook:
    """Listens at 127.0.0.1 of a namespace for as long as the `with` block lasts."""

    def __init__(self, namespace: str, port: int, told: Callable[[Notified], None] = lambda _: None) -> None:
        """`told` is called of each alert as it arrives, in a thread of the server's."""
        self._told = told
        self._lock = threading.Lock()
        self._all: list[Notified] = []
        self._server = _Server(("127.0.0.1", port), _Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = tcp_socket(namespace)
        self._server.webhook = self
        self._running = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._server.server_bind()
            self._server.server_activate()
        except BaseException:
            self._server.server_close()
            raise
        self._running.enter_context(running(self._server))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def take(self, alerts: list[Notified]) -> None:
        """What the handler got."""
        with self._lock:
            self._all += alerts
        for one in alerts:
            self._told(one)

    @property
    def all(self) -> tuple[Notified, ...]:
        """Everything so far, in the order in which it came."""
        with self._lock:
            return tuple(self._all)

    def standing(self) -> tuple[Notified, ...]:
        """The alerts that were last said to fire."""
        last = {tuple(sorted(one.labels.items())): one for one in self.all}
        return tuple(one for one in last.values() if one.status == FIRING)
