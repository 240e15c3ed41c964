"""Renders pages on a thread of its own: once for all who ask for the same before it begins.

So a thousand clients that ask cost as much as one.  A client waits for at most the rendering that goes on, one of each
other page that was asked for before, and its own.  The thread keeps to its share of a core when it is asked without
a pause; a client that scrapes by itself does not get to feel it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from railscope.exporters.web.cpu_share import CpuShare
from railscope.exporters.web.pages import Answer, Page

_BURST_SECONDS: Final = 3.0

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class Rendered(Generic[W]):
    """A page, for those who asked for it."""

    waiters: tuple[W, ...]
    answer: Answer | None
    """None: it could not be rendered."""
    error: Exception | None = None


class Renderings(Generic[W]):
    """Pages that were asked for and are not rendered yet.  `W` is who waits, compared by identity and hash.

    `ask`, `withdraw` and `close` are for one thread; the worker's is begun by the first that asks.
    """

    def __init__(
        self, name: str, render: Callable[[Page], Answer], done: Callable[[Rendered[W]], None], *, share: float
    ) -> None:
        """`render` and `done` are called on the worker's thread, which is `name`; it may take `share` of a core."""
        self._name = name
        self._render = render
        self._done = done
        self._share = CpuShare(share, _BURST_SECONDS, time.monotonic())
        self._changed = threading.Condition()
        self._asked: OrderedDict[Page, dict[W, None]] = OrderedDict()
        self._ending = False
        self._thread: threading.Thread | None = None

    def ask(self, page: Page, waiter: W) -> None:
        """`done` will be called with a rendering that begins after now."""
        with self._changed:
            self._asked.setdefault(page, {})[waiter] = None
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def withdraw(self, page: Page, waiter: W) -> None:
        """The waiter has gone; a rendering that has begun may still name it."""
        with self._changed:
            waiters = self._asked.get(page)
            if waiters is not None:
                waiters.pop(waiter, None)
                if not waiters:
                    del self._asked[page]

    def close(self, seconds: float) -> bool:
        """Render nothing more; whether the thread has ended within so long."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (begun := self._begin()) is not None:
            self._done(self._rendered(*begun))

    def _rendered(self, page: Page, waiters: tuple[W, ...]) -> Rendered[W]:
        before = time.thread_time()
        try:
            return Rendered(waiters, self._render(page))
        except Exception as error:  # noqa: BLE001  # whatever a page raises ends that page, never the thread
            return Rendered(waiters, None, error)
        finally:
            self._share.record(time.thread_time() - before, time.monotonic())

    def _begin(self) -> tuple[Page, tuple[W, ...]] | None:
        """The next page and those that wait for it; None: the server ends."""
        with self._changed:
            while not self._ending:
                rest = self._share.rest_seconds(time.monotonic())
                if self._asked and rest == 0:
                    page, waiters = self._asked.popitem(last=False)
                    return page, tuple(waiters)
                self._changed.wait(rest if self._asked else None)
            return None
