"""The one thread that owns every connection: waits for sockets, workers and deadlines, and tells `Clients` of them.

Newcomers come last in each turn: a client whose request is complete is heard before a newcomer may take its place.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from railscope.exporters.web.clients import Clients, is_shortage
from railscope.exporters.web.connection import Connection
from railscope.exporters.web.pages import Pages
from railscope.exporters.web.password_checks import Checked, PasswordChecks
from railscope.exporters.web.refusals import Reason, Refusals
from railscope.exporters.web.rendering import Rendered, Renderings
from railscope.exporters.web.replies import Replies
from railscope.exporters.web.settings import ServerSettings
from railscope.exporters.web.transport import PlainTransport

if TYPE_CHECKING:
    # Passwords and TLS are 6 MB of code, for those who configure them.
    from railscope.exporters.web.config import WebConfigFile

_logger: Final = logging.getLogger("railscope.http")

_BACKLOG: Final = 4096
"""Connections that the kernel keeps until they are accepted; beyond them it makes clients wait for a second."""
_BUFFER_BYTES: Final = 64 * 1024
"""Of the kernel, for each connection and direction; the kernel doubles it, and takes it from the service's memory."""
_ACCEPTS_AT_ONCE: Final = 256
_ACCEPTING_SECONDS: Final = 0.01
_AFTER_SHORTAGE_SECONDS: Final = 0.05
_CROWDED_LOOK_SECONDS: Final = 0.01
_SHARE_OF_DESCRIPTORS: Final = 4
_SCRAPES_SHARE: Final = 0.5
"""Of one core, where clients ask without a pause."""
_DOCUMENTS_SHARE: Final = 0.1
_CLOSE_SECONDS: Final = 2.0


class EventLoop:
    """Serves clients of a listening socket until closed."""

    def __init__(
        self,
        listener: socket.socket,
        settings: ServerSettings,
        pages: Pages,
        web: WebConfigFile | None,
        refusals: Refusals,
    ) -> None:
        """`listener` is bound, and belongs to this object from now on; it listens at once."""
        self._listener = listener
        self._refusals = refusals
        self._results: deque[Rendered[Connection] | Checked[Connection]] = deque()
        self._scrapes: Renderings[Connection] = Renderings(
            "railscope-scrape", pages.render, self._done, share=_SCRAPES_SHARE
        )
        self._documents: Renderings[Connection] = Renderings(
            "railscope-pages", pages.render, self._done, share=_DOCUMENTS_SHARE
        )
        self._checks: PasswordChecks[Connection] = PasswordChecks("railscope-auth", self._done)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._clients = Clients(
            settings,
            _places(settings.max_connections),
            Replies(pages, web),
            PlainTransport if web is None else web.transport,
            self._epoll,
            refusals,
            scrapes=self._scrapes,
            documents=self._documents,
            checks=self._checks,
        )
        self._ending = False
        self._listens = False
        self._deaf_until = 0.0
        """No newcomer is accepted before."""
        self._thread: threading.Thread | None = None
        # Accepted sockets inherit all of these.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setblocking(False)
        listener.listen(_BACKLOG)

    @property
    def idle_connections(self) -> int:
        """Connections that wait for a request; from any thread."""
        return self._clients.idle_count()

    def start(self) -> None:
        """Begin to answer, on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="railscope-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, end every connection, and wait for the workers, but not for long."""
        if self._listener.fileno() == -1:
            return
        self._ending = True
        if self._thread is not None:
            self._ring()
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():  # a health check that waits: what it uses stays open
                _logger.warning("the HTTP server did not end in time")
                return
            self._thread = None
        self._listener.close()
        self._clients.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        ended = [
            worker.close(max(0.0, deadline - time.monotonic()))
            for worker in (self._scrapes, self._documents, self._checks)
        ]
        self._epoll.close()
        if all(ended):
            os.close(self._wake)
        else:  # the descriptor stays, for the worker still writes to it
            _logger.warning("a page did not come to its end in time")

    def _done(self, result: Rendered[Connection] | Checked[Connection]) -> None:
        """A worker has a result; on its thread."""
        self._results.append(result)
        self._ring()

    def _ring(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while not self._ending:
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001  # the server outlives a defect
                line = f"the server: {type(error).__name__}: {error}"
                self._refusals.record(Reason.FAILED, line, time.monotonic())
                time.sleep(_AFTER_SHORTAGE_SECONDS)

    def _turn(self) -> None:
        clients = self._clients
        events = self._epoll.poll(self._patience_seconds())
        now = time.monotonic()
        newcomers = False
        for fd, what in events:
            if fd == self._wake:
                os.eventfd_read(self._wake)
            elif fd == self._listener.fileno():
                newcomers = True
            else:
                clients.on_event(fd, what, now)
        while self._results:
            result = self._results.popleft()
            if isinstance(result, Checked):
                clients.checked(result, now)
            else:
                clients.rendered(result, now)
        clients.go_on(now)
        if newcomers:
            self._accept(now)
        self._listen(now)
        now = time.monotonic()
        if now >= clients.next_deadline:
            clients.expire(now)
        if now >= self._refusals.due:
            self._refusals.tell(now)

    def _patience_seconds(self) -> float | None:
        """How long nothing has to be done but for what arrives; None: for ever."""
        clients = self._clients
        newcomers_due = math.inf if self._listens else self._deaf_until
        due = min(clients.next_deadline, clients.more_due, self._refusals.due, newcomers_due)
        return None if due == math.inf else max(0.0, due - time.monotonic())

    def _accept(self, now: float) -> None:
        end = time.monotonic() + _ACCEPTING_SECONDS
        for _ in range(_ACCEPTS_AT_ONCE):
            if time.monotonic() > end:
                return
            if not self._clients.may_accept(now):
                self._deaf_until = now + _CROWDED_LOOK_SECONDS
                return
            try:
                accepted, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if is_shortage(error):
                    # The newcomer stays waiting in the kernel, so do not spin on it.
                    self._clients.give_up_one(now)
                    self._deaf_until = now + _AFTER_SHORTAGE_SECONDS
                    return
                continue
            self._clients.welcome(accepted, str(address[0]), now)

    def _listen(self, now: float) -> None:
        """Look for newcomers, or do not until it makes sense again."""
        listens = now >= self._deaf_until
        if listens == self._listens:
            return
        if self._listens:
            self._epoll.unregister(self._listener.fileno())
        else:
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._listens = listens


def _places(wanted: int) -> int:
    """How many connections there may be: the agent needs most of its descriptors for other things."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft // _SHARE_OF_DESCRIPTORS))
