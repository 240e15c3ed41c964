"""A server inside a network namespace, reachable at 127.0.0.1 from outside.

Servers of the stack live in the fabric's switch namespace, where agents can be reached and ports are their usual ones
whatever runs on this machine.  People's browsers live outside: each connection to a free port of 127.0.0.1 is carried
on into the namespace, byte by byte.
"""

from __future__ import annotations

import select
import socketserver
import threading
from types import TracebackType
from typing import Final, Self

from railscope.testbed.namespaces import tcp_socket

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


class Loopback:
    """A port of 127.0.0.1 that leads into a namespace for as long as the `with` block lasts."""

    def __init__(self, namespace: str, host: str, port: int) -> None:
        self._listener = _Listener(("127.0.0.1", 0), _Carried)
        self._listener.namespace, self._listener.target = namespace, (host, port)
        self.url: Final = f"http://127.0.0.1:{self._listener.server_address[1]}"
        self._thread = threading.Thread(target=self._listener.serve_forever, kwargs={"poll_interval": 0.1})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()
