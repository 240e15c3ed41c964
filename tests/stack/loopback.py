"""A server inside a network namespace, reachable at 127.0.0.1 from outside.

Servers of the stack live in the fabric's switch namespace, where agents can be reached and ports are their usual ones
whatever runs on this machine.  People's browsers live outside: each connection to a free port of 127.0.0.1 is carried
on into the namespace, byte by byte.
"""

from __future__ import annotations

import select
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from railscope.testbed.namespaces import tcp_socket
from tests.serving import running

_CHUNK_BYTES: Final = 1 << 16
_PATIENCE_SECONDS: Final = 5.0


class _Carried(socketserver.BaseRequestHandler):
    server: _Listener

    def handle(self) -> None:
        try:
            with tcp_socket(self.server.namespace) as inside:
                inside.settimeout(_PATIENCE_SECONDS)
                inside.connect(self.server.target)
                others = {inside: self.request, self.request: inside}
                while True:
                    for one in select.select(list(others), [], [])[0]:
                        part = one.recv(_CHUNK_BYTES)
                        if not part:
                            return
                        others[one].sendall(part)
        except OSError:
            return  # nobody listens there any more, or one of the two has gone: the other one learns it from the end


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    namespace = ""
    target = ("", 0)


@contextmanager
def loopback(namespace: str, host: str, port: int) -> Iterator[str]:
    """Carry a free port of 127.0.0.1 into a namespace; yields its URL."""
    listener = _Listener(("127.0.0.1", 0), _Carried)
    listener.namespace, listener.target = namespace, (host, port)
    with running(listener):
        yield f"http://127.0.0.1:{listener.server_address[1]}"
