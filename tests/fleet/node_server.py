"""Serves a simulated fleet: /node/NUMBER is one node's metrics, /break/FAULT breaks it.

`python -m tests.fleet.node_server PORT NODES PROFILE` is a process of its own: what it costs is no matter of who
measures.
"""

from __future__ import annotations

import sys
import time
from http.server import ThreadingHTTPServer

from tests.fleet.simulation import Fault, Fleet
from tests.serving import QuietHandler

_RAN_BEFORE_SECONDS = 600.0
_MOST_WAITING = 1024


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        _, kind, which = self.path.split("/")
        fleet = self.server.fleet
        if kind == "break":
            fleet.break_by(Fault(which), time.time())
            self.answer(200, "text/plain", b"")
        elif int(which) in fleet.silent:
            self.answer(503, "text/plain", b"")
        else:
            self.answer(200, "text/plain; version=0.0.4", fleet.text(int(which), time.time()))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = _MOST_WAITING

    def __init__(self, port: int, fleet: Fleet) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.fleet = fleet


if __name__ == "__main__":
    _Server(int(sys.argv[1]), Fleet(int(sys.argv[2]), time.time() - _RAN_BEFORE_SECONDS, sys.argv[3])).serve_forever()
