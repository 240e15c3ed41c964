"""Servers of tests: each runs in a thread for as long as a block lasts, and says nothing of what it is asked."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

_POLL_SECONDS = 0.05


class QuietHandler(BaseHTTPRequestHandler):
    """A handler of HTTP requests that logs none of them."""

    def answer(self, status: int, kind: str, body: bytes) -> None:
        """The whole answer; `kind` is its content type."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running(server: socketserver.BaseServer) -> Iterator[None]:
    """Serve in a thread, and close the server in the end."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": _POLL_SECONDS})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
