"""A server that takes OTLP metrics over HTTP, as a collector does, and keeps what it took."""

from __future__ import annotations

import gzip
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class Received:
    """What came, oldest first."""

    url: str
    requests: list[Any] = field(default_factory=list)
    """ExportMetricsServiceRequest of those that were taken."""
    headers: list[dict[str, str]] = field(default_factory=list)
    """Of each request, taken or not; names in lower case."""
    answers: list[int] = field(default_factory=list)
    """HTTP status of the next answers; 200 when there is none left."""

    def points(self, name: str) -> dict[tuple[tuple[str, Any], ...], Any]:
        """The points of a metric in the newest request, by their attributes."""
        found = {}
        for metric in self.metrics():
            if metric.name == name:
                for point in getattr(metric, metric.WhichOneof("data")).data_points:
                    found[attributes_of(point.attributes)] = point
        return found

    def metrics(self) -> list[Any]:
        """The metrics of the newest request."""
        newest = self.requests[-1]
        return [
            one for resource in newest.resource_metrics for scope in resource.scope_metrics for one in scope.metrics
        ]


def attributes_of(pairs: Any) -> tuple[tuple[str, Any], ...]:
    """Attributes as sorted pairs."""
    return tuple(sorted((one.key, getattr(one.value, one.value.WhichOneof("value"))) for one in pairs))


@contextmanager
def receiver(context: ssl.SSLContext | None = None) -> Iterator[Received]:
    """Serve on a port of the loopback; with a context by TLS."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.headers.append({name.lower(): value for name, value in self.headers.items()})
            status = received.answers.pop(0) if received.answers else 200
            if status == 200:
                assert self.path == "/v1/metrics"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                received.requests.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scheme = "http"
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    received = Received(f"{scheme}://127.0.0.1:{server.server_port}/v1/metrics")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
