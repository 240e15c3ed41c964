"""The HTTP server that Prometheus scrapes.

It has what a daemon on a production node owes its host: whatever clients do, and however many of them, it takes a
bounded part of the node, and others still get their answers.  One thread owns all connections (event_loop.py), with a
place in a bounded table each (connection_table.py); requests become replies (replies.py) while clients go from phase to
phase (clients.py, connection.py); pages are rendered by another thread, once for all who ask for the same
(rendering.py), and passwords are checked by a third (password_checks.py).

Why not `http.server` or a framework: none of those bounds is theirs, and the agent would keep 6.5 MiB for `http.server`
and 8 MiB for asyncio alone, of a budget that its host was promised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from railscope.agent.facts.snapshot import Snapshot
from railscope.exporters.series.budget import SeriesBudget
from railscope.exporters.series.family import Family
from railscope.exporters.series.lean import FULL
from railscope.exporters.series.selection import Selection
from railscope.exporters.web.event_loop import EventLoop
from railscope.exporters.web.listen import ServerError, bound_socket, parse_listen_address
from railscope.exporters.web.pages import HEALTH_PATH, READY_PATH, Check, Pages, Processes, ShownTotals
from railscope.exporters.web.refusals import Refusals
from railscope.exporters.web.settings import ServerSettings

if TYPE_CHECKING:
    # Passwords and TLS are 6 MB of code, for those who configure them.
    from railscope.exporters.web.config import WebConfigFile

__all__ = ["MetricsServer", "ServerError", "ServerSettings"]


class MetricsServer:
    """Serves metrics and health until closed.  Listens from construction on, answers from `start` on.

    The callables run on the server's threads: `snapshot` one call at a time, `processes` beside it.  `healthy` and
    `ready` run on the one that owns all connections: they must not wait for anything.  Where one raises, the client
    gets a 500 of one line and the log the reason.

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
        profile: Callable[[], str] = lambda: FULL,
        web: WebConfigFile | None = None,
        kept: ShownTotals | None = None,
    ) -> None:
        path = settings.telemetry_path
        if not path.startswith("/") or path in (HEALTH_PATH, READY_PATH) or not path.isascii() or " " in path:
            raise ServerError(f"cannot serve metrics at {path!r}: choose another --web.telemetry-path, as /metrics")
        self._web = web
        self._path = path
        self._pages = Pages(
            telemetry_path=path,
            snapshot=snapshot,
            processes=processes,
            healthy=healthy,
            ready=ready,
            budget=budget or SeriesBudget(),
            selection=selection or Selection(),
            profile=profile,
            kept=kept,
        )
        self._address = parse_listen_address(settings.listen_address)
        listener = bound_socket(self._address)
        self._port = int(listener.getsockname()[1])
        self._refusals = Refusals()
        self._loop = EventLoop(listener, settings, self._pages, web, self._refusals)

    @property
    def port(self) -> int:
        """The port it listens on, also where the settings left the choice open."""
        return self._port

    @property
    def idle_connections(self) -> int:
        """Connections that wait for a request."""
        return self._loop.idle_connections

    def refusals(self) -> Mapping[str, int]:
        """How many clients and requests were refused or dropped, by reason."""
        return self._refusals.counts()

    @property
    def url(self) -> str:
        """Where to reach it from this host; for every address, the loopback's."""
        host = self._address.host or "localhost"
        scheme = "https" if self._web and self._web.tls_context() else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def keep_totals(self, snapshot: Callable[[], Snapshot]) -> None:
        """Save the totals without answering a scrape; on any thread, one call at a time."""
        self._pages.keep_totals(snapshot)

    def give_families(self, take: Callable[[Family], object]) -> Snapshot:
        """Give each family that a scrape would show to `take`; on any thread.  Returns their snapshot."""
        return self._pages.give_families(take)

    def start(self) -> None:
        """Begin to answer, on a thread of its own."""
        self._loop.start()

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._loop.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
