"""The HTTP server that Prometheus scrapes.

It has what a daemon on a production node owes its host: a bound on connections, of which idle and abandoned ones make
room for new ones, one deadline for each request however slowly it trickles in, one line instead of a traceback for
every error, TLS and passwords from a web configuration file, and no name lookups on the way.

Why not `http.server` or a framework: none of those bounds is theirs, and the agent would keep 6.5 MiB for `http.server`
and 8 MiB for asyncio alone, of a budget that its host was promised.  `socketserver` accepts connections; what a request
says is read by http_request.py.
"""

from __future__ import annotations

import logging
import re
import select
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from railscope.agent.facts.snapshot import Snapshot
from railscope.exporters.series.budget import SeriesBudget
from railscope.exporters.series.selection import Selection
from railscope.exporters.web.http_request import Request, RequestRefused, parse_request, without_empty_lines
from railscope.exporters.web.listen import ServerError, bound_socket, parse_listen_address
from railscope.exporters.web.pages import HEALTH_PATH, READY_PATH, Answer, Check, Pages, Processes, one_line_answer

if TYPE_CHECKING:
    # Passwords and TLS are 6 MB of code, for those who configure them.
    from railscope.exporters.web.config import WebConfigFile

__all__ = ["MetricsServer", "ServerError", "ServerSettings"]

_logger: Final = logging.getLogger("railscope.http")
_MAX_HEAD_BYTES: Final = 16 * 1024
_END_OF_HEAD: Final = re.compile(rb"\r?\n\r?\n")
_SEND_BYTES: Final = 256 * 1024
_DRAIN_BYTES: Final = 8 * 1024 * 1024
_DRAIN_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 2.0
_AFTER_FAILED_ACCEPT_SECONDS: Final = 0.05
_LOOK_SECONDS: Final = 60.0
"""How often the accept loop wakes for nothing."""
_LEAVING_SECONDS: Final = 0.5
"""For connections that were told to end, before another one is refused."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    listen_address: str = "127.0.0.1:9779"
    telemetry_path: str = "/metrics"
    max_connections: int = 16
    """Connections served at once.  A further one takes the place of one whose client has gone, or of the one that has
    been idle for longest; where there is none it is answered 503, or closed where TLS is on."""
    request_timeout_seconds: float = 10.0
    """For a handshake, for a request to arrive once it began, and for an answer to be taken."""
    idle_timeout_seconds: float = 30.0
    """How long a connection may wait for its next request."""


class MetricsServer:
    """Serves metrics and health until closed.  Listens from construction on, answers from `start` on.

    The callables run on connection threads: `snapshot` one call at a time, `processes`, `healthy` and `ready` at any
    time.  Where one raises, the client gets a 500 of one line and the log the reason.

    Raises:
        ServerError: the address or the telemetry path cannot be used.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        snapshot: Callable[[], Snapshot],
        processes: Processes = lambda _wanted: (),
        healthy: Check,
        ready: Check,
        budget: SeriesBudget | None = None,
        selection: Selection | None = None,
        web: WebConfigFile | None = None,
    ) -> None:
        path = settings.telemetry_path
        if not path.startswith("/") or path in (HEALTH_PATH, READY_PATH) or not path.isascii() or " " in path:
            raise ServerError(f"cannot serve metrics at {path!r}: choose another --web.telemetry-path, as /metrics")
        self._web = web
        self._path = path
        pages = Pages(
            telemetry_path=path,
            snapshot=snapshot,
            processes=processes,
            healthy=healthy,
            ready=ready,
            budget=budget or SeriesBudget(),
            selection=selection or Selection(),
        )
        self._address = parse_listen_address(settings.listen_address)
        self._connections = _Connections(bound_socket(self._address), settings, pages, web)
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port it listens on, also where the settings left the choice open."""
        return int(self._connections.server_address[1])

    @property
    def idle_connections(self) -> int:
        """Connections that wait for a request."""
        return self._connections.idle_count()

    @property
    def url(self) -> str:
        """Where to reach it from this host; for every address, the loopback's."""
        host = self._address.host or "localhost"
        scheme = "https" if self._web and self._web.tls_context() else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def start(self) -> None:
        """Begin to answer, on a thread of its own."""
        self._thread = threading.Thread(
            target=self._connections.serve_forever, args=(_LOOK_SECONDS,), name="railscope-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end every connection."""
        if self._thread is not None:
            # Wakes the accept loop, which hardly ever looks for the end of its work by itself.
            self._connections.ending = True
            _shut_down(self._connections.socket)
            self._connections.shutdown()
            self._thread.join()
            self._thread = None
        self._connections.end()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _ClientGoneError(Exception):
    """The client closed, broke or stalled the connection."""


@dataclass(slots=True)
class _Slot:
    """One accepted connection."""

    current: socket.socket
    """What speaks for it: the accepted socket or TLS."""
    idle_since: float | None
    """When it began to wait for a request; None: it has one."""
    leaving: bool = False
    """It was asked to end, and another one has its slot."""

    def abandoned(self) -> bool:
        """Whether the client has closed its end, so that the answer is not needed."""
        watch = select.poll()
        try:
            watch.register(self.current, select.POLLRDHUP)
            return bool(watch.poll(0))
        except (OSError, ValueError):
            return True


class _Connections(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Accepts connections and bounds their number.

    Not `http.server.HTTPServer`: that one resolves the host's full name on start, which can take a resolver's
    timeout on a node without DNS.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, listener: socket.socket, settings: ServerSettings, pages: Pages, web: WebConfigFile | None
    ) -> None:
        socketserver.BaseServer.__init__(self, listener.getsockname(), _Connection)
        self.socket = listener
        self.settings = settings
        self.pages = pages
        self.web = web
        self._open: dict[socket.socket, _Slot] = {}
        """By accepted socket."""
        self._changed = threading.Condition()
        self.ending = False
        """Nobody is to be accepted any more."""
        self.server_activate()

    def end(self) -> None:
        """Close the listener and every connection, and wait for their threads."""
        self.server_close()
        with self._changed:
            for slot in self._open.values():
                _shut_down(slot.current)
            if not self._changed.wait_for(lambda: not self._open, timeout=_CLOSE_SECONDS):
                _logger.warning("%d connections did not end in time", len(self._open))

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            # Out of file descriptors, most likely: the connection stays waiting, so do not spin on it.
            if not self.ending:
                time.sleep(_AFTER_FAILED_ACCEPT_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            # They end at once, unless every processor is busy: the new client is worth a moment's wait.
            self._changed.wait_for(lambda: not self._crowded_by_leaving(), timeout=_LEAVING_SECONDS)
            full = not self._has_room() and not self._make_room()
            if not full:
                self._open[request] = _Slot(request, time.monotonic())
        if full:
            self._refuse(request, client_address)
        else:
            super().process_request(request, client_address)

    def _has_room(self) -> bool:
        return sum(not slot.leaving for slot in self._open.values()) < self.settings.max_connections

    def _crowded_by_leaving(self) -> bool:
        """Whether so many connections were told to end, and have not ended yet, that there may be no more."""
        return len(self._open) >= 2 * self.settings.max_connections

    def _make_room(self) -> bool:
        """Close an idle connection; `_changed` is held."""
        if self._crowded_by_leaving():
            return False
        staying = [slot for slot in self._open.values() if not slot.leaving]
        idle = [slot for slot in staying if slot.idle_since is not None]
        slot = next((slot for slot in staying if slot.abandoned()), None)
        slot = slot or min(idle, key=lambda slot: slot.idle_since or 0.0, default=None)
        if slot is None:
            return False
        slot.leaving = True
        _shut_down(slot.current)
        return True

    def idle_count(self) -> int:
        """See `MetricsServer.idle_connections`."""
        with self._changed:
            return sum(slot.idle_since is not None and not slot.leaving for slot in self._open.values())

    def note_idle(self, current: socket.socket, *, idle: bool) -> None:
        """A connection begins to wait for a request, or has got the first bytes of one."""
        with self._changed:
            for slot in self._open.values():
                if slot.current is current:
                    slot.idle_since = time.monotonic() if idle else None

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(self.settings.request_timeout_seconds)
        context = self.web.tls_context() if self.web else None
        if context is None:
            _Connection(request, client_address, self)
            return
        with context.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as secured:
            with self._changed:
                self._open[request].current = secured
            try:
                secured.do_handshake()
            except OSError as error:
                _logger.info("%s: TLS handshake failed: %s", _peer(client_address), error)
                return
            if self.web is not None and not self.web.allows_peer(secured):
                _logger.info("%s: refused: its certificate has no allowed name", _peer(client_address))
                return
            _Connection(secured, client_address, self)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log what ended a connection; the client has had its answer."""
        error = sys.exc_info()[1]
        _logger.error("%s: %s: %s", _peer(client_address), type(error).__name__, error)
        _logger.debug("where it was raised", exc_info=True)

    def _refuse(self, request: socket.socket, client_address: Any) -> None:
        _logger.warning("%s: refused: all %d connections are taken", _peer(client_address), len(self._open))
        try:
            if not (self.web and self.web.tls_context()):
                request.setblocking(False)
                request.send(
                    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
                    b"Content-Length: 21\r\nConnection: close\r\n\r\ntoo many connections\n"
                )
        except OSError as error:
            _logger.debug("%s: %s", _peer(client_address), error)
        finally:
            self.shutdown_request(request)


class _Connection(socketserver.BaseRequestHandler):
    """One client's requests, one after the other."""

    server: _Connections

    def setup(self) -> None:
        self._arrived = b""
        self._closing = False
        self._answered = True
        self._more_may_come = False
        """The client may still be sending what is not read."""

    def handle(self) -> None:
        try:
            while not self._closing:
                self._handle_one()
            if self._more_may_come:
                self._drain()
        except _ClientGoneError as error:
            _logger.debug("%s: %s", _peer(self.client_address), error)

    def _handle_one(self) -> None:
        head = self._head()
        self._answered = False
        try:
            if len(head) > _MAX_HEAD_BYTES:
                raise RequestRefused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            request = parse_request(head)
            self._more_may_come = request.has_body
            answer = self._answer(request)
            # As a literal: what a client sent must not be able to write lines of the log.
            _logger.debug("%s: %r %d", _peer(self.client_address), request.line, answer.status)
            self._finish(answer, close=request.has_body or not request.stays, only_head=request.method == "HEAD")
        except RequestRefused as refused:
            _logger.debug("%s: %d", _peer(self.client_address), refused.status)
            self._more_may_come = True
            self._finish(one_line_answer(refused.status, refused.status.phrase.lower()), close=True)
        finally:
            # Where something raised: the client gets one line, `handle_error` logs the rest.
            if not self._answered:
                self._finish(
                    one_line_answer(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the agent's log"), close=True
                )

    def _answer(self, request: Request) -> Answer:
        web = self.server.web
        if web is not None and not web.authorised(request.headers.get("authorization", "")):
            challenge = (("WWW-Authenticate", 'Basic realm="railscope", charset="UTF-8"'),)
            return one_line_answer(HTTPStatus.UNAUTHORIZED, "a user and password are required", challenge)
        if request.method not in ("GET", "HEAD"):
            return one_line_answer(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", (("Allow", "GET, HEAD"),))
        return self.server.pages.answer(
            request.path,
            accept=request.headers.get("accept", ""),
            accept_encoding=request.headers.get("accept-encoding", ""),
        )

    def _finish(self, answer: Answer, *, close: bool, only_head: bool = False) -> None:
        self._answered = True
        self._closing = close
        lines = [
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
            "Server: railscope",
            # The C locale's names: a daemon sets no other.
            f"Date: {time.strftime('%a, %d %b %Y %H:%M:%S GMT', time.gmtime())}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
        ]
        web = self.server.web
        lines += [f"{name}: {value}" for name, value in (*answer.headers, *(web.headers() if web else ()))]
        if close:
            lines.append("Connection: close")
        head = "\r\n".join((*lines, "", "")).encode("latin-1")
        self._send(head if only_head else head + answer.body)

    def _head(self) -> bytes:
        """The next request up to its empty line, or more than the limit of bytes where that does not come.

        Empty lines before it are passed over; after more of them than the limit there is no request: no bytes.

        Raises:
            _ClientGoneError: no request came, or not all of one in time.
        """
        deadline = time.monotonic() + self.server.settings.idle_timeout_seconds
        started = False
        empty_bytes = 0
        if not without_empty_lines(self._arrived):
            self.server.note_idle(self.request, idle=True)
        while True:
            rest = without_empty_lines(self._arrived)
            empty_bytes += len(self._arrived) - len(rest)
            self._arrived = rest
            if empty_bytes > _MAX_HEAD_BYTES:
                return b""
            if self._arrived and not started:
                started = True
                self.server.note_idle(self.request, idle=False)
                deadline = time.monotonic() + self.server.settings.request_timeout_seconds
            end = _END_OF_HEAD.search(self._arrived)
            if end or len(self._arrived) > _MAX_HEAD_BYTES:
                cut = end.end() if end else len(self._arrived)
                head, self._arrived = self._arrived[:cut], self._arrived[cut:]
                return head
            try:
                self._wait_at_most_until(deadline)
                more = self.request.recv(_MAX_HEAD_BYTES)
            except OSError as error:
                raise _ClientGoneError(f"no request: {error}") from error
            if not more:
                raise _ClientGoneError("closed")
            self._arrived += more

    def _send(self, data: bytes) -> None:
        deadline = time.monotonic() + self.server.settings.request_timeout_seconds
        rest = memoryview(data)
        try:
            while rest:
                self._wait_at_most_until(deadline)
                rest = rest[self.request.send(rest[:_SEND_BYTES]) :]
        except OSError as error:
            raise _ClientGoneError(f"answer not taken: {error}") from error

    def _drain(self) -> None:
        """Take what the client still sends, within limits: closing on it would take the answer back from the client."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        left = _DRAIN_BYTES
        try:
            self.request.shutdown(socket.SHUT_WR)
            while left > 0:
                self._wait_at_most_until(deadline)
                more = self.request.recv(_SEND_BYTES)
                if not more:
                    return
                left -= len(more)
        except OSError as error:
            raise _ClientGoneError(f"still sending: {error}") from error

    def _wait_at_most_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.request.settimeout(left)


def _shut_down(current: socket.socket) -> None:
    try:
        # The plain socket's, also for TLS: wake the thread that waits on it, without a farewell.
        socket.socket.shutdown(current, socket.SHUT_RDWR)
    except OSError as error:
        _logger.debug("already closed: %s", error)


def _peer(client_address: Any) -> str:
    return str(client_address[0])
